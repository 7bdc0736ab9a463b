"""Users' bug reports, section C: parameters, limits, log probabilities, echo, n."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import choices_of, joined
from tests.support.e2e_stack import until
from tests.support.gateway import CHAT, COMPLETIONS, MAX_MODEL_LEN, MODEL, Stack, script
from tests.support.http import Answer, call
from tests.support.service_process import ServiceProcess
from tests.support.stack_fixtures import StartStack

USER = [{"role": "user", "content": "hi"}]
PROMPTS = pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "hi"})]
)
STREAM = pytest.mark.parametrize("stream", [False, True])


def refused(answer: Answer, param: str) -> None:
    """400 that names the parameter."""
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"].split(".")[0] == param
    assert param in answer.json()["error"]["message"]


@STREAM
async def test_c17_max_completion_tokens(stack: Stack, stream: bool) -> None:
    async def tokens(**fields: Any) -> int:
        answer = await stack.chat(stream=stream, logprobs=True, **fields)
        entries = [choice["logprobs"]["content"] for choice in choices_of(answer) if choice["logprobs"]]
        return sum(map(len, entries))

    assert await tokens(max_completion_tokens=1) == 1
    assert await tokens(max_completion_tokens=3, max_tokens=5) == 3
    assert await tokens(max_completion_tokens=5, max_tokens=3) == 3
    refused(await stack.complete(max_completion_tokens=1), "max_completion_tokens")


async def test_c18_completion_logprobs_of_zero(stack: Stack) -> None:
    choice = (await stack.complete(logprobs=0, max_tokens=4)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 4
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert logprobs["top_logprobs"] is None
    for value in (True, -1, 6, "1", 1.5):
        refused(await stack.complete(logprobs=value), "logprobs")


@STREAM
async def test_c19_c20_c21_echo_with_log_probabilities(stack: Stack, stream: bool) -> None:
    prompts = ["\n1. Carol", "The sky is blue", "a long prompt " * 20]
    for prompt in prompts:
        answers = [
            await stack.complete(prompt, echo=True, logprobs=1, max_tokens=1, seed=3, stream=stream)
            for _ in range(2)
        ]
        merged = [logprobs_of(answer) for answer in answers]
        assert merged[0] == merged[1]
        tokens, values, tops, offsets = merged[0]
        text, _ = joined(answers[0])
        assert "".join(tokens) == text
        assert text.startswith(prompt)
        whole = (await stack.complete(prompt, max_tokens=1)).json()["usage"]
        assert len(tokens) == len(values) == len(tops) == len(offsets) == whole["prompt_tokens"] + 1
        assert (values[0], tops[0]) == (None, None)
        assert all(value <= 0 for value in values[1:])
        assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))
        assert all(text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))
    await stack.alive()


def logprobs_of(answer: Answer, index: int = 0) -> tuple[list[Any], ...]:
    """The four arrays of a completion's choice, of all its chunks."""
    found = [c["logprobs"] for c in choices_of(answer) if c["index"] == index and c["logprobs"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return tuple([item for part in found for item in part[name]] for name in names)


@PROMPTS
@pytest.mark.parametrize(
    "bias", [{"AI": -100}, {"1.5": 1}, {"": 1}, {"-1": 5}, {"512": 5}, {"1": 101}, [1], "x"]
)
async def test_c22_logit_bias_of_no_token_is_refused(
    stack: Stack, path: str, prompt: dict[str, Any], bias: Any
) -> None:
    refused(await stack.post(path, {**prompt, "logit_bias": bias}), "logit_bias")
    assert (await stack.post(path, {**prompt, "logit_bias": {"7": 5}, "max_tokens": 1})).status == 200


@PROMPTS
@pytest.mark.parametrize("name", ["token_ids_logprob", "allowed_token_ids", "stop_token_ids", "bad_words"])
async def test_c23_negative_ids(stack: Stack, path: str, prompt: dict[str, Any], name: str) -> None:
    refused(await stack.post(path, {**prompt, name: [-1]}), name)


@STREAM
async def test_c24_every_number_of_alternatives_up_to_the_cap(stack: Stack, stream: bool) -> None:
    for count in (0, 1, 9, 10, 11, 20):
        answer = await stack.chat(logprobs=True, top_logprobs=count, max_tokens=2, stream=stream)
        entries = [e for c in choices_of(answer) if c["logprobs"] for e in c["logprobs"]["content"]]
        assert len(entries) == 2
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == count
    refused(await stack.chat(logprobs=True, top_logprobs=21, stream=stream), "top_logprobs")
    for count in (0, 1, 5):
        answer = await stack.complete(logprobs=count, max_tokens=2, stream=stream)
        tops = [t for c in choices_of(answer) if c["logprobs"] for t in c["logprobs"]["top_logprobs"] or []]
        assert all(count <= len(top) <= count + 1 for top in tops)
        assert len(tops) == (2 if count else 0)
    for count in (9, 10, 11, 20, 21):
        refused(await stack.complete(logprobs=count, stream=stream), "logprobs")
    refused(await stack.complete(prompt_logprobs=21, stream=stream), "prompt_logprobs")
    await stack.alive()


@PROMPTS
async def test_c24_every_number_of_alternatives_of_the_prompt(
    stack: Stack, path: str, prompt: dict[str, Any]
) -> None:
    for count in (0, 1, 9, 10, 11, 20):
        body = (await stack.post(path, {**prompt, "prompt_logprobs": count, "max_tokens": 1})).json()
        places = body["prompt_logprobs"] if path == CHAT else body["choices"][0]["prompt_logprobs"]
        assert len(places) == body["usage"]["prompt_tokens"]
        assert places[0] is None
        for place in places[1:]:
            assert len(place) == max(1, count)
            assert all(set(value) == {"logprob", "rank", "decoded_token"} for value in place.values())


@PROMPTS
@STREAM
async def test_c25_n_choices_once_each(stack: Stack, path: str, prompt: dict[str, Any], stream: bool) -> None:
    fields = {"n": 3, "max_tokens": 5, "seed": 4, "stream": stream}
    answer = await stack.post(path, {**prompt, **fields})
    assert {choice["index"] for choice in choices_of(answer)} == {0, 1, 2}
    texts = [joined(answer, index)[0] for index in range(3)]
    assert len(set(texts)) == 3
    again = await stack.post(path, {**prompt, **fields, "stream": not stream})
    assert [joined(again, index)[0] for index in range(3)] == texts


@STREAM
async def test_c25_two_prompts_of_two(stack: Stack, stream: bool) -> None:
    both = await stack.complete(["one", "two"], n=2, seed=4, max_tokens=5, stream=stream)
    assert {choice["index"] for choice in choices_of(both)} == {0, 1, 2, 3}
    for place, prompt in enumerate(("one", "two")):
        alone = await stack.complete(prompt, n=2, seed=4, max_tokens=5)
        for sample in range(2):
            assert joined(both, 2 * place + sample) == joined(alone, sample)


async def test_c26_best_of(stack: Stack) -> None:
    answer = await stack.complete(n=2, best_of=2, stream=True, max_tokens=3)
    assert {choice["index"] for choice in choices_of(answer)} == {0, 1}
    refused(await stack.complete(best_of=1, n=2), "best_of")
    refused(await stack.complete(best_of=3, n=1, stream=True), "best_of")
    whole = (await stack.complete(best_of=3, n=1, max_tokens=3)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0]
    assert whole["usage"]["completion_tokens"] == 9


async def test_c27_no_seed_differs_between_gateways(stack: Stack, run_dir: Path) -> None:
    """Two processes: this one, and another."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    config = stack.gateway.config
    flags = ["--port", str(port), "--router", ",".join(config.router), f"--tokenizer={config.tokenizer[0]}"]
    flags += [f"--client-secret-file={config.client_secret_file}", f"--state-dir={run_dir}/other"]
    other = ServiceProcess("gateway", "gateway", tuple(flags), run_dir)
    addresses = [stack.address, f"http://127.0.0.1:{port}"]
    other.start()
    try:
        await until(partial(is_ready, addresses[1]), "another ready gateway", timeout_s=30)
        body = {"model": MODEL, "prompt": "x", "temperature": 1, "max_tokens": 16}
        answers = [await call(address, "POST", COMPLETIONS, body) for address in addresses * 5]
        assert len({joined(answer)[0] for answer in answers}) == 10
    finally:
        other.stop()


async def is_ready(address: str) -> bool:
    with suppress(OSError):
        return (await call(address, "GET", "/ready")).status == 200
    return False


async def test_c28_a_seed_is_reproducible(stack: Stack) -> None:
    fields = {"seed": 123, "temperature": 0.5, "max_tokens": 30}
    alone = [joined(await stack.complete("x", **fields)) for _ in range(5)]
    assert len(set(alone)) == 1
    crowd = [stack.complete(f"p{number}", max_tokens=40) for number in range(8)]
    among, *_ = await asyncio.gather(stack.complete("x", **fields), *crowd)
    assert joined(among) == alone[0]
    assert joined(await stack.complete("x", **{**fields, "seed": 124})) != alone[0]
    pairs = [await stack.complete("x", n=2, **fields) for _ in range(2)]
    assert [joined(pairs[0], i) for i in range(2)] == [joined(pairs[1], i) for i in range(2)]
    assert joined(pairs[0], 0) != joined(pairs[0], 1)


@PROMPTS
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
async def test_c29_penalties_are_taken(stack: Stack, path: str, prompt: dict[str, Any], name: str) -> None:
    neighbour = asyncio.create_task(stack.complete("neighbour", max_tokens=60, seed=1))
    assert (await stack.post(path, {**prompt, name: 1.05, "max_tokens": 9})).status == 200
    refused(await stack.post(path, {**prompt, name: 2.05}), name)
    assert joined(await neighbour) == joined(await stack.complete("neighbour", max_tokens=60, seed=1))


@STREAM
async def test_c30_prompts_at_the_edge_of_the_context(stack: Stack, stream: bool) -> None:
    def too_long(answer: Answer, *numbers: int) -> None:
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (400, "context_length_exceeded")
        assert all(str(number) in error["message"] for number in numbers)

    edge = MAX_MODEL_LEN
    too_long(await stack.complete([7] * (edge + 1), max_tokens=1, stream=stream), edge, edge + 2)
    too_long(await stack.complete([7] * (edge - 1), max_tokens=2, stream=stream), edge, edge + 1)
    fits = await stack.complete([7] * (edge - 1), max_tokens=1, stream=stream)
    assert joined(fits)[1] == "length"
    too_long(await stack.chat("q" * 3000, stream=stream), edge)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "user", "content": [{"type": "text", "text": "q" * edge}, image]}
    refused(await stack.post(CHAT, {"messages": [message], "stream": stream}), "messages")
    for prompt, answer in (
        ([7] * (edge + 1), await stack.complete([7] * (edge + 1), truncate_prompt_tokens=5, max_tokens=1)),
        ("chat", await stack.chat("q" * 3000, truncate_prompt_tokens=5, max_tokens=1)),
    ):
        assert answer.json()["usage"]["prompt_tokens"] == 5, prompt


async def test_no_case_left_anything_behind(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=1))
    jobs = [stack.complete(f"p{number}", n=2, stop=["ee"], max_tokens=50) for number in range(10)]
    assert {answer.status for answer in await asyncio.gather(*jobs)} == {200}
    await stack.alive()
