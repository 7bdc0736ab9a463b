"""Sampling options from a plain gRPC client through router and servicer to an engine core with a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from catenary.client import AsyncClient
from catenary.rpc import RpcError
from catenary.v1 import common_pb2, engine_pb2
from services.engine.app import EngineApp
from services.engine.config import EngineConfig
from services.engine.domain import BeamOptions
from tests.support.beams import expected_beams
from tests.support.engines import FAST
from tests.support.fleet import Fleet
from tests.support.torch_engine import VOCAB, save_tiny_model
from tests.support.waiting import eventually

PROMPT = [5, 9, 33, 5, 71, 9, 5]
LONG = [3 + at * 7 % 120 for at in range(70)]
START_S = 90.0
SERVING = engine_pb2.ENGINE_STATE_SERVING
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class Answer:
    """What the client got."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt: list[float] = []
        self.tops: list[int] = []
        self.end = common_pb2.SequenceEnd()


async def ask(client: AsyncClient, prompt: list[int] = PROMPT, **options: Any) -> Answer:
    answer = Answer()
    chosen = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options}
    async for delta in client.generate(prompt, model="tiny", **chosen):
        answer.tokens += delta.token_ids
        answer.prompt += delta.prompt_logprobs.logprobs
        answer.tops += delta.prompt_logprobs.top_counts
        if delta.HasField("end"):
            answer.end = delta.end
    return answer


@pytest.fixture
async def client(start_fleet: Any, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A router and one engine with a random model, whose core is a process; a client of the router."""
    directory = save_tiny_model("llama", tmp_path)
    fleet: Fleet = await start_fleet(engines=0)
    options: dict[str, Any] = {
        "model": str(directory),
        "served_model_name": "tiny",
        "dtype": "float32",
        "device_threads": 1,
        "kv_cache_gib": 0.01,
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "warmup": "skip",
        "max_logit_bias": 4,
    }
    app = EngineApp(
        EngineConfig(router=(fleet.router_address,), **{**FAST, **fleet.secrets.options, **options})
    )
    await app.start()
    try:
        await eventually(
            lambda: any(engine.state == SERVING for engine in fleet.router.fleet),
            "a serving engine",
            timeout_s=START_S,
        )
        async with AsyncClient(fleet.router_address, secret=fleet.secrets.client) as made:
            yield made
        await eventually(lambda: app.frontend.live_sequences == 0, "an idle engine")
        assert app.frontend.core_restarts == 0
    finally:
        await app.stop(0.0)


def reference(directory: Path) -> Any:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(directory, dtype="float32")
    model.generation_config.eos_token_id = None
    return model.eval()


def greedy(model: Any, **options: Any) -> list[int]:
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, pad_token_id=0, **options
        )
    tokens: list[int] = whole[0, len(PROMPT) :].tolist()
    return tokens


async def check_search(client: AsyncClient, model: Any) -> None:
    """Hypotheses come over the core's link and two streams as generate finds them."""
    stops = list(range(0, VOCAB, 7))
    options = BeamOptions(4, 1.5, results=3)
    expected = expected_beams(model, PROMPT, options, stops=stops, max_new_tokens=12)
    search = client.generate(
        PROMPT,
        model="tiny",
        max_tokens=12,
        stop_token_ids=stops,
        ignore_eos=True,
        top_logprobs=2,
        beam_search=common_pb2.BeamSearch(width=4, length_penalty=1.5, results=3),
    )
    last = [one async for one in search][-1]
    found = last.end.hypotheses
    assert [list(one.token_ids) for one in found] == [tokens for tokens, _ in expected]
    assert [one.score for one in found] == pytest.approx([score for _, score in expected], rel=1e-4)
    for one in found:
        score = sum(one.logprobs.sampled) / len(one.token_ids) ** 1.5
        assert (one.score, list(one.logprobs.rows)) == (pytest.approx(score, rel=1e-4), [0])
        assert one.reason == (STOP if one.token_ids[-1] in stops else LENGTH)
    assert last.end.usage.completion_tokens == sum(len(one.token_ids) for one in found)


@pytest.mark.timeout(180)
async def test_options_reach_the_sampler_and_bad_ones_do_not(
    client: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference(tmp_path)
    plain = greedy(model)
    bias = {(plain[1],): -3.0, (40,): 2.5}
    expected = [
        plain,
        greedy(model, repetition_penalty=1.7),
        greedy(model, bad_words_ids=[[plain[0]], plain[3:5]]),
        greedy(model, sequence_bias=bias),
    ]
    answers = await asyncio.gather(
        ask(client),
        ask(client, repetition_penalty=1.7),
        ask(client, bad_words=[[plain[0]], plain[3:5]]),
        ask(client, logit_bias={ids[0]: value for ids, value in bias.items()}, priority=-1),
        ask(client, allowed_token_ids=[7, 8], temperature=2, seed=3, cache_salt="tenant"),
        ask(client, temperature=1.5, min_p=1.0, seed=4),
        ask(client, temperature=1.5, top_k=1, keep_top_k_duplicates=False, seed=4),
    )
    assert [answer.tokens for answer in answers[:4]] == expected
    assert set(answers[4].tokens) <= {7, 8}
    assert answers[5].tokens == answers[6].tokens == plain
    penalised = await ask(client, frequency_penalty=2, presence_penalty=2, max_tokens=60)
    free = await ask(client, max_tokens=60)
    assert len(set(penalised.tokens)) > len(set(free.tokens))

    await check_search(client, model)

    # C20, C21, C24: twice, beside others, the prompt longer than a block and than a step.
    with torch.inference_mode():
        truth = torch.log_softmax(model(torch.tensor([LONG])).logits[0], -1)
    wanted = [float(truth[at, token]) for at, token in enumerate(LONG[1:])]
    for count, answer in zip(
        (0, 10, 20),
        await asyncio.gather(*[ask(client, LONG, prompt_logprobs=count) for count in (0, 10, 20)]),
        strict=True,
    ):
        assert answer.prompt == pytest.approx(wanted, abs=1e-4)
        assert answer.tops == [count] * (len(LONG) - 1)

    stuck = await ask(client, allowed_token_ids=[50], bad_words=[[50, 50]])
    assert stuck.tokens == [50]
    assert stuck.end.error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert not stuck.end.error.retryable

    neighbour = asyncio.create_task(ask(client, max_tokens=60))
    # The client refuses them itself; one in another language may not.
    monkeypatch.setattr("catenary.client.async_client.check_options", lambda options: None)
    for name, value in BAD.items():
        with pytest.raises(RpcError) as refusal:
            await ask(client, **{name: value})
        assert refusal.value.error.param == name
        assert refusal.value.error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert (await neighbour).tokens[:12] == plain


BAD: dict[str, Any] = {
    "min_p": 1.5,
    "presence_penalty": float("nan"),
    "frequency_penalty": -2.5,
    "repetition_penalty": 0,
    "logit_bias": {VOCAB: 1.0},
    "bad_words": [[1], []],
    "allowed_token_ids": [VOCAB],
    "prompt_logprobs": 21,
    "top_logprobs": 21,
    "min_tokens": 13,
    "stop_token_ids": [VOCAB],
    "cache_salt": "x" * 129,
}
