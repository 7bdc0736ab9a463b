"""Offline batches with the real small model, against transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from catenary import LLM, SamplingParams
from catenary_apps.llm import local_engine

if TYPE_CHECKING:
    from catenary_apps.llm import RequestOutput
    from tests.support.reference import Reference

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 =", "Water boils at"]
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(model_directory: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_gib": 0.25,
        "max_model_len": 512,
        "max_num_seqs": 8,
    }
    with LLM(str(model_directory), progress=False, **options) as model:
        yield model
    with pytest.raises(RuntimeError, match="closed"):
        model.generate("x")
    model.close()


def test_tokens_are_those_of_transformers_and_in_order(llm: LLM, reference: Reference):
    prompts = PROMPTS * 4
    told: list[RequestOutput] = []
    outputs = llm.generate(prompts, GREEDY, on_output=told.append)
    assert sorted(map(id, told)) == sorted(map(id, outputs))
    assert [output.prompt for output in outputs] == prompts
    pairs = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    assert all(difference is None or difference.near_tie for difference in reference.differences(pairs))
    for output in outputs:
        text = reference.tokenizer.decode(output.outputs[0].token_ids)
        assert output.outputs[0].text == text
        assert output.outputs[0].finish_reason == "length"


def test_prompts_have_parameters_of_their_own_and_forms(llm: LLM):
    ids = llm.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids
    params = [
        SamplingParams(temperature=0, max_tokens=3, n=2, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=8, stop="Paris"),
        SamplingParams(temperature=0.7, seed=5, max_tokens=4),
        SamplingParams(temperature=0, max_tokens=30, structured_outputs={"choice": ["left", "right"]}),
    ]
    prompts: list[Any] = [ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, "Which way?"]
    scored, stopped, drawn, chosen = llm.generate(prompts, params)
    assert len(scored.outputs) == 2
    first = scored.outputs[0]
    assert first.logprobs is not None
    assert scored.prompt_logprobs is not None
    assert len(first.logprobs) == 3
    assert sum(
        entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True)
    ) == (pytest.approx(first.cumulative_logprob))
    assert scored.prompt_logprobs[0] is None
    assert all(ids[place] in entry for place, entry in enumerate(scored.prompt_logprobs) if entry)
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "Paris")
    assert "Paris" not in stopped.outputs[0].text
    assert drawn.outputs[0].text == llm.generate(PROMPTS[0], params[2])[0].outputs[0].text
    assert chosen.outputs[0].text in ("left", "right")


def test_chats_are_rendered_by_the_template(llm: LLM):
    one = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=32))
    several = llm.chat([QUESTION, QUESTION], SamplingParams(temperature=0, max_tokens=32))
    assert "Paris" in one[0].outputs[0].text
    assert [output.outputs[0].text for output in several] == [one[0].outputs[0].text] * 2


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ("x", SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids"),
        ("", SamplingParams(), "prompt"),
        ([10**6], SamplingParams(), "vocabulary"),
        ({"text": "x"}, SamplingParams(), "prompt_token_ids"),
        ("x", [GREEDY, GREEDY], "2 sampling_params"),
        ("x", SamplingParams(structured_outputs={"regex": "["}), "not closed"),
        ("x" * 9000, SamplingParams(), "at most 512"),
    ],
)
def test_what_cannot_be_honoured_is_a_value_error(llm: LLM, prompt, params, text):
    with pytest.raises(ValueError, match=text):
        llm.generate([prompt, PROMPTS[0]] if not isinstance(params, list) else prompt, params)
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))


def test_an_embedding_of_a_chat_model_is_refused(llm: LLM):
    with pytest.raises(ValueError, match="generates text"):
        llm.embed("x")


def test_threads_share_an_llm(llm: LLM):
    alone = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [alone] * 4


def test_vectors_have_length_one():
    with LLM("minilm", progress=False) as model:
        outputs = model.embed(["A cat sleeps.", "A kitten naps.", [101, 2054, 102]])
    vectors = [output.outputs.embedding for output in outputs]
    assert [len(vector) for vector in vectors] == [384] * 3
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0] * 3)
    assert outputs[2].prompt_token_ids == [101, 2054, 102]
    assert sum(a * b for a, b in zip(vectors[0], vectors[1], strict=True)) > 0.5


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"dtype": "float7"}, {"max_model_len": 10**9}])
def test_bad_options_are_one_line(model_directory: Path, options):
    with pytest.raises((ValueError, RuntimeError)):
        LLM(str(model_directory), progress=False, **options)


def test_a_core_that_dies_ends_what_waits(monkeypatch: pytest.MonkeyPatch):
    cores: list[local_engine.CoreThread] = []

    def noted(*arguments: Any) -> local_engine.CoreThread:
        cores.append(core_thread(*arguments))
        return cores[-1]

    core_thread = local_engine.CoreThread
    monkeypatch.setattr(local_engine, "CoreThread", noted)
    with LLM("minilm", progress=False) as model:
        cores[0].terminate()
        with pytest.raises(RuntimeError, match="engine has failed"):
            model.embed(["x"] * 500)
