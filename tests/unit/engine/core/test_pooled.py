"""The pooled core: its numbers are those of transformers, and one document's trouble is its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from services.engine.core.errors import CoreFailure, StartError
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import AbortSequences
from services.engine.model import ModelError, Task, class_labels, find_task, read_config
from tests.support.encoders import (
    ENCODERS,
    break_token,
    save_cross_encoder,
    save_decoder_classifier,
    save_encoder,
)
from tests.support.pooled_core import LocalPooledCore, document, open_pooling, unpack
from tests.support.torch_engine import save_tiny_model

TOLERANCE = 1e-5
# A batch's matrix products have other shapes than a single document's, and the library that computes them
# sums in another order: float32 rounding is all that a neighbour may change.
NEIGHBOURS = 2e-6
LENGTHS = (3, 300, 17, 64, 150, 9, 255, 33, 5, 4)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]


def close(found: list[list[float]], expected: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.as_tensor(expected, dtype=torch.float32), atol=tolerance, rtol=0
    )


def save_yes_no_tokenizer(directory: Path) -> None:
    words = {"yes": 11, "no": 12, "a": 13, "[UNK]": 14}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def test_vectors_of_an_encoder(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path)
    core = LocalPooledCore(tmp_path)
    batch = documents()
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in batch]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1)
    together = core.vectors(batch)
    close(together, expected)
    close([core.vectors([ids])[0] for ids in batch], together, NEIGHBOURS)
    ready = core.engine.ready
    assert (ready.model.task, ready.model.embedding_width, ready.model.max_model_len) == ("embed", 48, 320)
    assert not core.loop.work.busy


def test_the_last_token_of_a_chat_model(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, max_position_embeddings=320)
    core = LocalPooledCore(tmp_path, dtype="float32")
    batch = documents()
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype="float32").eval()
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in batch]
    close(core.vectors(batch), torch.nn.functional.normalize(torch.stack(states), dim=-1))


def test_fewer_dimensions(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    core = LocalPooledCore(tmp_path, embedding_dimensions="16, 8")
    assert core.engine.ready.model.embedding_dimensions == [8, 16]
    ids = documents((40,))[0]
    whole, eight = core.vectors([ids, ids], dimensions=[0, 8])
    cut = torch.nn.functional.normalize(torch.tensor(whole[:8]), dim=0)
    close([eight], cut.unsqueeze(0), 1e-6)
    with pytest.raises(StartError, match="from 1 to 48"):
        LocalPooledCore(tmp_path, embedding_dimensions="8,49")


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("identity", [False, True])
def test_scores_of_a_cross_encoder(kind: str, identity: bool, tmp_path: Path) -> None:
    named = "torch.nn.modules.linear.Identity"
    settings = {"sentence_transformers": {"activation_fn": named}} if identity else {}
    types = 2 if kind == "bert" else 1
    model = save_cross_encoder(kind, tmp_path, type_vocab_size=types, **settings)
    core = LocalPooledCore(tmp_path, Task.SCORE)
    batch, seconds = documents(), [len(ids) // 2 for ids in documents()]
    logits = []
    for ids, second in zip(batch, seconds, strict=True):
        types_of = torch.tensor([[int(index >= second) for index in range(len(ids))]])
        options = {"token_type_ids": types_of} if types > 1 else {}
        with torch.inference_mode():
            logits.append(model(torch.tensor([ids]), **options).logits[0])
    expected = torch.stack(logits)
    found = core.vectors(batch, second_start=seconds)
    close(found, expected if identity else expected.sigmoid(), 1e-4 if identity else TOLERANCE)
    assert core.engine.ready.model.task == "score"


LOGITS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "softmax": ({}, lambda logits: logits.softmax(-1)),
    "several labels": ({"problem_type": "multi_label_classification"}, lambda logits: logits.sigmoid()),
    "regression": ({"problem_type": "regression"}, lambda logits: logits),
    "of sentence-transformers": (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        lambda logits: logits.sigmoid(),
    ),
}


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("case", LOGITS)
def test_probabilities_of_classes(kind: str, case: str, tmp_path: Path) -> None:
    config, activate = LOGITS[case]
    names = {0: "bad", 1: "so-so", 2: "good"}
    model = save_cross_encoder(kind, tmp_path, num_labels=3, id2label=names, **config)
    core = LocalPooledCore(tmp_path, Task.CLASSIFY)
    batch = documents()
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([ids])).logits[0] for ids in batch])
    close(core.vectors(batch), activate(logits))
    facts = core.engine.ready.model
    assert (facts.task, facts.labels, facts.embedding_width) == ("classify", ["bad", "so-so", "good"], 0)
    # The model's last step is left out for those that ask for that, in the same forward too.
    found = core.vectors(batch, raw=[place % 2 == 0 for place in range(len(batch))])
    for place, row in enumerate(found):
        truth = logits if place % 2 == 0 else activate(logits)
        close([row], truth[place : place + 1], 1e-4)


def test_one_class_has_a_probability_that_is_no_softmax(tmp_path: Path) -> None:
    named = "torch.nn.modules.activation.Softmax"
    model = save_cross_encoder("bert", tmp_path, sentence_transformers={"activation_fn": named})
    core = LocalPooledCore(tmp_path, Task.SCORE)
    with torch.inference_mode():
        logit = model(torch.tensor([[5, 6, 7]])).logits
    close(core.vectors([[5, 6, 7]]), logit.sigmoid())
    close(core.vectors([[5, 6, 7]], raw=[True]), logit, 1e-4)


def test_a_raw_vector_keeps_its_length(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path)
    core = LocalPooledCore(tmp_path)
    with torch.inference_mode():
        mean = model(torch.tensor([[5, 6, 7]])).last_hidden_state.mean(1)
    close(core.vectors([[5, 6, 7]], raw=[True]), mean, 1e-4)
    close(core.vectors([[5, 6, 7]], raw=[True], dimensions=[7]), mean[:, :7], 1e-4)
    close(core.vectors([[5, 6, 7]], dimensions=[7]), torch.nn.functional.normalize(mean[:, :7], dim=-1))


@pytest.mark.parametrize(("kind", "labels"), [("llama", 3), ("qwen2", 3), ("qwen3", 1)])
def test_classes_of_a_decoder_with_a_head(kind: str, labels: int, tmp_path: Path) -> None:
    model = save_decoder_classifier(kind, tmp_path, num_labels=labels)
    task = find_task(tmp_path, read_config(tmp_path))
    assert task is (Task.SCORE if labels == 1 else Task.CLASSIFY)
    core = LocalPooledCore(tmp_path, task, dtype="float32")
    batch = documents()
    rows = []
    for ids in batch:
        with torch.inference_mode():
            rows.append(model(torch.tensor([ids])).logits[0])
    logits = torch.stack(rows)
    close(core.vectors(batch), logits.sigmoid() if labels == 1 else logits.softmax(-1))
    close(core.vectors(batch, raw=[True] * len(batch)), logits, 1e-4)
    assert core.engine.ready.model.labels == ([] if labels == 1 else ["LABEL_0", "LABEL_1", "LABEL_2"])


def test_decoders_with_a_head_that_are_not_served(tmp_path: Path) -> None:
    save_decoder_classifier("llama", tmp_path)
    for task in ("generate", "embed"):
        with pytest.raises(ModelError, match="a decoder with a head for classes; its task is classify"):
            find_task(tmp_path, read_config(tmp_path), task)
    with pytest.raises(StartError, match="does not run decoders with a head for classes"):
        LocalPooledCore(tmp_path, Task.CLASSIFY, model_backend="transformers")
    good = json.loads((tmp_path / "config.json").read_text())
    for change, text in (
        (
            {"architectures": ["Qwen2ForSequenceClassification"]},
            "a Qwen2ForSequenceClassification of type llama",
        ),
        ({"id2label": {"0": "a", "1": "b"}}, r"has a \(3, 48\) tensor score.weight, where .* says \(2, 48\)"),
        ({"hidden_act": "silu_of_another_kind"}, "is not accepted|does not know"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(good | change))
        with pytest.raises(StartError, match=text):
            LocalPooledCore(tmp_path, Task.CLASSIFY)
    small = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for kind, text in (
        ("GPT2", "is a GPT2For.* of type gpt2, which is not supported"),
        ("Phi", "does not know"),
    ):
        config = getattr(transformers, f"{kind}Config")(**small, **ids)
        directory = tmp_path / kind
        getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(directory)
        with pytest.raises(StartError, match=text):
            LocalPooledCore(directory, Task.CLASSIFY)


def test_a_config_with_unknown_classes_is_refused(tmp_path: Path) -> None:
    save_cross_encoder("bert", tmp_path, num_labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, text in (
        ({"problem_type": "riddle"}, "problem_type is none of"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation function is none of"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(StartError, match=text):
            LocalPooledCore(tmp_path, Task.CLASSIFY)
    for labels in ({"id2label": {}, "num_labels": 2000}, {"id2label": None, "num_labels": "3"}):
        with pytest.raises(ModelError, match="1 to 1024"):
            class_labels(config | labels)


def test_scores_of_a_model_that_says_yes_or_no(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path, max_position_embeddings=320)
    save_yes_no_tokenizer(tmp_path)
    core = LocalPooledCore(tmp_path, Task.SCORE)
    batch = documents()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    expected = []
    for ids in batch:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected.append([float(torch.softmax(logits[[12, 11]], dim=0)[1])])
    close(core.vectors(batch), expected)


def test_the_task_comes_from_the_files(tmp_path: Path) -> None:
    for name, save in (("e", save_encoder), ("c", save_cross_encoder)):
        save("bert", tmp_path / name)
    save_tiny_model("llama", tmp_path / "g")
    save_tiny_model("llama", tmp_path / "s")
    (tmp_path / "s" / "modules.json").write_text("[]")
    wanted = {"e": Task.EMBED, "c": Task.SCORE, "g": Task.GENERATE, "s": Task.EMBED}
    for name, task in wanted.items():
        assert find_task(tmp_path / name, read_config(tmp_path / name)) is task
    for name, wrong in (("e", "generate"), ("e", "score")):
        with pytest.raises(ModelError):
            find_task(tmp_path / name, read_config(tmp_path / name), wrong)
    save_cross_encoder("bert", tmp_path / "two", num_labels=2)
    assert find_task(tmp_path / "two", read_config(tmp_path / "two")) is Task.CLASSIFY
    assert class_labels(read_config(tmp_path / "two")) == ("LABEL_0", "LABEL_1")
    refused = (("two", "score", "2 classes"), ("e", "classify", "no head"), ("g", "classify", "no head"))
    for name, wrong, text in refused:
        with pytest.raises(ModelError, match=text):
            find_task(tmp_path / name, read_config(tmp_path / name), wrong)
    with pytest.raises(StartError, match="not a tokenizer"):
        LocalPooledCore(tmp_path / "g", Task.SCORE)
    with pytest.raises(StartError, match="role decode is for models that generate"):
        LocalPooledCore(tmp_path / "e", role="decode")


def test_urgent_documents_come_first_and_aborted_ones_not_at_all(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    core = LocalPooledCore(tmp_path, max_num_batched_tokens=32)
    for key in range(1, 7):
        core.loop.handle(document(key, [5] * 20, priority=-1 if key in (4, 5) else 0))
    core.loop.handle(AbortSequences([2, 5, 99]))
    assert core.run() == [2, 5, 4, 1, 3, 6]
    assert {key: end.reason for key, end in core.ends.items() if end.reason is not FinishReason.STOP} == {
        2: FinishReason.ABORT,
        5: FinishReason.ABORT,
    }
    assert core.ends[2].prompt_tokens == 20
    load = core.link.sent[-1].load
    assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 0, 0)


def test_what_would_hurt_is_refused_by_the_core_itself(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    core = LocalPooledCore(tmp_path, max_waiting=0)
    for key, ids in enumerate(([-1], [128], [], [5] * 321), 1):
        core.loop.handle(document(key, ids))
    limit = core.engine.ready.capacity.max_running
    for key in range(10, 11 + limit):
        core.loop.handle(document(key, [5] * 300))
    core.run()
    assert {core.ends[key].error_code for key in range(1, 5)} == {CoreErrorCode.INVALID_ARGUMENT}
    assert core.ends[10 + limit].error_code is CoreErrorCode.OVERLOADED
    assert all(core.ends[key].reason is FinishReason.STOP for key in range(10, 10 + limit))


def test_a_document_that_overflows_or_fails_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    break_token(tmp_path, 9)
    core = LocalPooledCore(tmp_path)
    compute = core.engine.embedder.compute

    def failing(rows: int, length: int, batch: list[list[int]], seconds: list[int]) -> torch.Tensor:
        if any(77 in ids for ids in batch):
            raise RuntimeError("a kernel fails")
        return compute(rows, length, batch, seconds)

    core.engine.embedder.compute = failing  # type: ignore[method-assign, assignment]
    good = [6] * 20
    expected = core.vectors([good])[0]
    for key, ids in enumerate((good, [5, 9, 5], [77] * 18, good), 1):
        core.loop.handle(document(key, ids))
    core.run()
    assert core.ends[2].error_message == "The model's output for this document is not a number."
    assert core.ends[3].error_message == "The engine failed on this document."
    for key in (1, 4):
        close([unpack(core.ends[key].vector)], [expected])
    for key in (10, 11):
        core.loop.handle(document(key, [77] * 18))
    core.loop.handle(document(12, [77] * 40))
    with pytest.raises(CoreFailure, match="3 documents failed in a row"):
        core.run()


def test_warm_up_meets_every_shape(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    core = LocalPooledCore(tmp_path, warmup="background")
    shapes = core.engine.shapes_to_warm
    while core.loop.warm_up():
        pass
    core.vectors(documents())
    core.loop.handle(document(1, [5]))
    core.run()
    graphs = core.link.sent[-1].load.graphs
    assert (graphs.warm, graphs.to_warm, graphs.first_seen) == (shapes, shapes, 0)
    full = open_pooling(tmp_path, warmup="full")
    assert full.device.execution.shapes.first_seen == len(full.embedder.shapes.all())
    assert not full.to_warm


def test_a_long_forward_shows_that_it_goes_on(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, max_position_embeddings=2048)
    core = LocalPooledCore(tmp_path, max_num_batched_tokens=64)
    core.loop.handle(document(1, [5] * 1500))
    core.run()
    reports = [message.load for message in core.link.sent]
    # 2048 tokens in chunks of 512.
    assert [load.running for load in reports] == [1, 1, 1, 0]
