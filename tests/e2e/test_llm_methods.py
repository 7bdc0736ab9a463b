"""Calls of an offline LLM beside generate and chat: tiny random models, against transformers in float32."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from catenary import (
    LLM,
    BeamSearchParams,
    GuidedDecodingParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.support.tiny_llm import OPTIONS, chat_model, classifier, encoder
from tests.support.tiny_tokenizer import byte_ids

TOLERANCE = 1e-5
TEXTS = ["A cat sleeps.", "QZX", "the rain in Spain", "x" * 40]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), **OPTIONS, max_num_seqs=8) as made:
        yield made


def logits_of(directory: Path, texts: list[Any], llm: LLM) -> torch.Tensor:
    """What transformers gives for texts, or pairs of them, in one row each."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype="float32").eval()
    tokenizer = llm.get_tokenizer()
    rows = []
    for text in texts:
        pair = text if isinstance(text, tuple) else (text,)
        encoded = tokenizer(*pair, return_tensors="pt")
        with torch.inference_mode():
            rows.append(model(input_ids=encoded["input_ids"]).logits[0])
    return torch.stack(rows)


def close(found: list[float], expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=tolerance, rtol=0)


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    ids = tokenizer.encode("QZX")
    assert ids == byte_ids("QZX") == llm.generate("QZX", SamplingParams(max_tokens=1))[0].prompt_token_ids
    assert tokenizer.decode(ids) == "QZX"
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(max_tokens=1)
    rendered = llm.chat(chat, params)[0].prompt_token_ids
    assert tokenizer.encode(text) == rendered
    # One text is what a user says.
    assert llm.chat("hi", params)[0].prompt_token_ids == rendered
    conversations: list[Any] = ["hi", chat]
    assert [one.prompt_token_ids for one in llm.chat(conversations, params)] == [rendered] * 2
    with pytest.raises(TypeError, match="messages must be a text or a list"):
        llm.chat(chat[0], params)  # type: ignore[arg-type]


def test_an_answer_that_is_not_decoded_has_its_tokens(llm: LLM) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": 1}
    decoded = llm.generate("QZX", SamplingParams(**given))[0].outputs[0]
    (output,) = llm.generate("QZX", SamplingParams(**given, detokenize=False))
    (bare,) = output.outputs
    assert decoded.text
    assert (bare.text, bare.token_ids, output.prompt) == ("", decoded.token_ids, "QZX")
    assert bare.logprobs is not None
    assert [sorted(entry) for entry in bare.logprobs] == [sorted(entry) for entry in decoded.logprobs or ()]
    assert all(one.decoded_token is None for entry in bare.logprobs for one in entry.values())


def test_structured_outputs_by_either_name(llm: LLM) -> None:
    for params in (
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["left", "right"])),
        SamplingParams(guided_decoding=GuidedDecodingParams(regex="left|right")),
    ):
        assert llm.generate("QZX", params)[0].outputs[0].text in ("left", "right")


def test_what_is_read_of_the_engine(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.model_config.max_model_len == llm.model_config.max_model_len == 512
    assert engine.model_config.dtype is torch.float32
    assert engine.model_config.hf_config.model_type == "llama"
    assert engine.scheduler_config.max_num_seqs == 8
    assert engine.get_tokenizer() is engine.tokenizer is llm.get_tokenizer()
    with pytest.raises(AttributeError, match="LLM has no sleep"):
        llm.sleep()  # type: ignore[attr-defined]


def test_defaults_are_those_of_the_models_files(tmp_path: Path) -> None:
    directory = chat_model(tmp_path)
    defaults = {"temperature": 0.25, "top_k": 5, "max_new_tokens": 3}
    file = directory / "generation_config.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | defaults))
    with LLM(str(directory), **OPTIONS) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0.25, 5, 3, 1.0)
        assert len(llm.generate("QZX")[0].outputs[0].token_ids) <= 3
        params.ignore_eos, params.max_tokens = True, 7
        assert len(llm.generate("QZX", params)[0].outputs[0].token_ids) == 7


def test_calls_name_what_is_of_a_wrong_kind(llm: LLM) -> None:
    calls: list[tuple[Any, str]] = [
        (lambda: llm.generate(None), "prompts must be a text"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", {"temperature": 0}), "sampling_params must be"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", on_output=5), "on_output must be a function"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", use_tqdm="no"), "use_tqdm must be"),  # type: ignore[arg-type]
        (lambda: llm.chat(5), "messages must be"),  # type: ignore[arg-type]
        (lambda: llm.beam_search(5, BeamSearchParams(2, 2)), "prompts must be"),  # type: ignore[arg-type]
        (lambda: llm.beam_search("a", SamplingParams()), "params must be a BeamSearch"),  # type: ignore[arg-type]
    ]
    for call, text in calls:
        with pytest.raises(TypeError, match=text):
            call()
    with pytest.raises(ValueError, match="concurrency_limit must be an integer of at least 1"):
        llm.beam_search("a", BeamSearchParams(2, 2), concurrency_limit=0)
    with pytest.raises(ValueError, match=r"LLM.generate has no lora_request"):
        llm.generate("a", lora_request=object())
    params = SamplingParams(max_tokens=1)
    assert llm.generate("a", params, lora_request=None)
    assert llm.chat("a", params, lora_request=None)
    (both,) = llm.generate({"prompt": "QZX", "prompt_token_ids": byte_ids("QZX")}, params)
    assert both.prompt == "QZX"


@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_beams_are_those_of_transformers(llm: LLM, directory: Path, length_penalty: float) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    tokenizer = llm.get_tokenizer()
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=length_penalty)
    prompts: list[Any] = ["QZX", {"prompt_token_ids": byte_ids("abc")}]
    for prompt, found in zip(("QZX", "abc"), llm.beam_search(prompts, params), strict=True):
        ids = tokenizer.encode(prompt) if prompt == "QZX" else byte_ids(prompt)
        wanted = model.generate(
            torch.tensor([ids]),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=6,
            do_sample=False,
            length_penalty=length_penalty,
            pad_token_id=0,
            eos_token_id=2,
        )
        assert len(found.sequences) == 3
        for beam, expected in zip(found.sequences, wanted.tolist(), strict=True):
            assert beam.tokens == expected[: len(beam.tokens)]
            with torch.inference_mode():
                scores = model(torch.tensor([beam.tokens])).logits[0].log_softmax(-1)
            new = beam.tokens[len(ids) :]
            steps = [float(scores[len(ids) + place - 1, token]) for place, token in enumerate(new)]
            assert beam.cum_logprob == pytest.approx(sum(steps), abs=1e-4)
            told = [entry[token].logprob for entry, token in zip(beam.logprobs, new, strict=True)]
            assert told == pytest.approx(steps, abs=1e-4)
            assert beam.text.startswith(prompt)
            assert beam.finish_reason in ("stop", "length")


@pytest.mark.parametrize(("labels", "kind"), [(3, "softmax"), (3, "sigmoid"), (1, "sigmoid")])
def test_classes(labels: int, kind: str, tmp_path: Path) -> None:
    changes = {"problem_type": "multi_label_classification"} if (labels, kind) == (3, "sigmoid") else {}
    directory = classifier(tmp_path, labels, **changes)
    with LLM(str(directory), **OPTIONS) as llm:
        logits = logits_of(directory, TEXTS, llm)
        task = "classify" if labels > 1 else "score"
        wanted = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
        found = llm.classify(TEXTS)
        for one, text, row in zip(found, TEXTS, wanted, strict=True):
            close(one.outputs.probs, row)
            assert one.outputs.num_classes == labels
            assert one.prompt_token_ids == llm.get_tokenizer().encode(text)
        raw = llm.classify({"prompt": TEXTS[0]}, PoolingParams(use_activation=False))
        close(raw[0].outputs.probs, logits[0], 1e-4)
        (encoded,) = llm.encode(llm.get_tokenizer().encode("QZX"), pooling_task=task)
        assert (encoded.outputs.data.dtype, encoded.outputs.data.shape) == (torch.float32, (labels,))
        close(encoded.outputs.data.tolist(), wanted[1])
        with pytest.raises(ValueError, match=r"LLM\.generate: this model (classifies|scores)"):
            llm.generate("x")
        with pytest.raises(ValueError, match=r"LLM\.embed: this model"):
            llm.embed("x")
        with pytest.raises(ValueError, match="have 'dimensions'"):
            llm.encode("x", PoolingParams(dimensions=4))


def test_scores_of_pairs(tmp_path: Path) -> None:
    directory = classifier(tmp_path, 1)
    with LLM(str(directory), **OPTIONS) as llm:
        query, documents = TEXTS[0], TEXTS * 20
        wanted = logits_of(directory, [(query, text) for text in TEXTS], llm)[:, 0]
        (one,) = llm.score(query, TEXTS[1])
        close([one.outputs.score], wanted[1:2].sigmoid())
        # More than one request holds.
        many = llm.score(query, documents)
        close([found.outputs.score for found in many], wanted.sigmoid().repeat(20))
        each = llm.score([query, query], TEXTS[:2], use_tqdm=False)
        close([found.outputs.score for found in each], wanted[:2].sigmoid())
        raw = llm.score(query, TEXTS, PoolingParams(use_activation=False))
        close([found.outputs.score for found in raw], wanted, 1e-4)
        assert len({found.request_id for found in many}) == len(documents)
        assert one.prompt_token_ids == llm.get_tokenizer()(query, TEXTS[1])["input_ids"]
        for first, second in ((TEXTS[:2], TEXTS[:3]), ([], "x"), ("x", [])):
            with pytest.raises(ValueError, match=r"text_\d"):
                llm.score(first, second)


def test_vectors_and_their_cosines(tmp_path: Path) -> None:
    directory = encoder(tmp_path)
    with LLM(str(directory), **OPTIONS, embedding_dimensions="any", max_model_len=32) as llm:
        model = transformers.AutoModel.from_pretrained(directory, dtype="float32").eval()
        tokenizer = llm.get_tokenizer()
        with torch.inference_mode():
            states = [model(torch.tensor([tokenizer.encode(text)])).last_hidden_state for text in TEXTS[:3]]
        means = [state[0].mean(0) for state in states]
        unit = torch.nn.functional.normalize(torch.stack(means), dim=-1)
        found = llm.embed(TEXTS[:3])
        assert [one.outputs.hidden_size for one in found] == [48] * 3
        for one, row in zip(found, unit, strict=True):
            close(one.outputs.embedding, row)
        (short,) = llm.embed(TEXTS[0], dimensions=5)
        close(short.outputs.embedding, torch.nn.functional.normalize(means[0][:5], dim=-1))
        (raw,) = llm.encode(TEXTS[0], PoolingParams(use_activation=False, task="embed"))
        close(raw.outputs.data.tolist(), means[0], 1e-4)
        scores = llm.score(TEXTS[0], TEXTS[:3])
        close([one.outputs.score for one in scores], unit @ unit[0])
        assert scores[1].prompt_token_ids == tokenizer.encode(TEXTS[0]) + tokenizer.encode(TEXTS[1])
        assert len(llm.encode(TEXTS[3], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 32
        refused: list[tuple[Any, str]] = [
            (lambda: llm.embed(TEXTS[3]), "at most 32 fit"),
            (lambda: llm.encode("x", pooling_task="token_embed"), "each token is not done yet"),
            (lambda: llm.encode("x", pooling_task="reward"), "must be embed, classify or score"),
            (lambda: llm.encode("x", pooling_task="classify"), "LLM.encode: this model makes embeddings"),
            (lambda: llm.classify("x"), "LLM.classify: this model makes embeddings"),
            (lambda: llm.chat("x"), "LLM.chat: this model makes embeddings"),
            (lambda: llm.beam_search("x", BeamSearchParams(2, 2)), "LLM.beam_search: this model"),
            (lambda: llm.score("a", "b", PoolingParams(use_activation=False)), "cosines"),
            (lambda: llm.score("a", "b", PoolingParams(dimensions=2)), "dimensions"),
            (
                lambda: llm.embed("a", PoolingParams(task="classify")),
                "LLM.embed: this model",
            ),
            (lambda: llm.embed("a", PoolingParams(task="zzz")), "pooling_params.task must be embed"),
            (lambda: llm.embed("a", lora_request=1), "LLM.embed has no lora_request"),
        ]
        for call, text in refused:
            with pytest.raises(ValueError, match=text):
                call()


def test_a_seed_of_the_llm_repeats_a_program(llm: LLM, directory: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)

    def program() -> list[list[int]]:
        with LLM(str(directory), seed=7, **OPTIONS) as made:
            return [made.generate("QZX", params)[0].outputs[0].token_ids for _ in range(3)]

    first = program()
    assert program() == first
    assert len({tuple(ids) for ids in first}) > 1


def test_progress_in_a_pipe_is_lines(llm: LLM, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(str(directory), **OPTIONS | {"progress": True}) as made:
        made.generate("x", SamplingParams(max_tokens=1))
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert lines[0] == f"catenary: loading {directory}"
    assert "catenary: loading weights" in lines
    assert lines[-1] == "catenary: ready"
    assert len(set(lines)) == len(lines)
    with LLM(str(directory), **OPTIONS | {"progress": True}, use_tqdm_on_load=False):
        assert capsys.readouterr().err == ""


def test_a_start_that_fails_leaves_no_thread(llm: LLM, directory: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="max-model-len"):
        LLM(str(directory), **OPTIONS, max_model_len=10**6)
    assert not {thread.name for thread in set(threading.enumerate()) - before if "catenary" in thread.name}
