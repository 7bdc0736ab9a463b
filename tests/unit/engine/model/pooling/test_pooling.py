"""Embeddings equal those of transformers, and do not depend on the batch around a document."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.model import ModelError
from services.engine.model.open_model import open_model
from services.engine.model.pooling import (
    Embedder,
    EmbedError,
    EmbedShapes,
    Pooling,
    PoolingSettings,
    open_embedder,
    read_pooling,
)
from tests.support.encoders import ENCODERS, break_token, save_encoder
from tests.support.torch_engine import save_tiny_model
from tests.support.torch_families import FAMILIES, save_family

TOLERANCE = 1e-4
LENGTHS = (3, 300, 17, 64, 150, 9, 255, 33)


def documents(vocab: int = 128) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in LENGTHS]


def write_modules(directory: Path, mode: dict[str, Any], *, normalize: bool, more: str | None = None) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *([more] if more else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": paths.get(kind, f"{index}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **mode}))


def expected(model: Any, batch: list[list[int]], pooling: Pooling, *, normalize: bool) -> torch.Tensor:
    """Each document by itself, by transformers."""
    rows = []
    for document in batch:
        with torch.inference_mode():
            states = model(torch.tensor([document])).last_hidden_state[0]
        rows.append({Pooling.CLS: states[0], Pooling.MEAN: states.mean(0), Pooling.LAST: states[-1]}[pooling])
    found = torch.stack(rows)
    return torch.nn.functional.normalize(found, dim=-1) if normalize else found


def assert_independent(embedder: Embedder, batch: list[list[int]], truth: torch.Tensor) -> None:
    """In one call, in reversed order, and one by one."""
    whole = embedder.embed(batch)
    assert whole.dtype is torch.float32
    assert whole.shape == (len(batch), embedder.dim)
    single = torch.cat([embedder.embed([document]) for document in batch])
    for found in (whole, embedder.embed(batch[::-1]).flip(0), single):
        torch.testing.assert_close(found, truth, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(
    ("mode", "pooling", "normalize"),
    [
        ({"pooling_mode_cls_token": True}, Pooling.CLS, False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN, True),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST, True),
    ],
)
def test_encoders(kind: str, mode: dict[str, Any], pooling: Pooling, normalize: bool, tmp_path: Path) -> None:
    model = save_encoder(kind, tmp_path)
    write_modules(tmp_path, mode, normalize=normalize)
    embedder = open_embedder(tmp_path, CpuDevice(1), dtype="float32", max_tokens=600)
    assert embedder.max_length == 320
    batch = documents()
    assert_independent(embedder, batch, expected(model, batch, pooling, normalize=normalize))


# How much of a vector's length the packed weights of these random encoders may take it away.
PACKED = [(None, TOLERANCE), (Quantization.INT8, 0.06), (Quantization.INT4, 0.25)]


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(("quantization", "limit"), PACKED, ids=["float32", "int8", "int4"])
def test_encoders_with_packed_weights(
    kind: str, quantization: Quantization | None, limit: float, tmp_path: Path
) -> None:
    model = save_encoder(kind, tmp_path)
    device = CpuDevice(1, settings=CpuSettings(KernelChoice.NATIVE, quantization))
    embedder = open_embedder(tmp_path, device, dtype="float32", max_tokens=600)
    batch = documents()
    found = embedder.embed(batch)
    truth = expected(model, batch, Pooling.MEAN, normalize=True)
    assert (found - truth).norm(dim=1).max() < limit
    assert_independent(embedder, batch, found)


def test_an_encoder_says_what_it_cannot_do(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    packed = CpuDevice(1, settings=CpuSettings(KernelChoice.NATIVE, Quantization.INT8))
    with pytest.raises(ModelError, match="quantization int8 needs the native kernels: float16 is not native"):
        open_embedder(tmp_path, packed, dtype="float16")
    with pytest.raises(ModelError, match="model-backend decoder is for models that generate"):
        open_embedder(tmp_path, CpuDevice(1), backend="decoder")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_decoders_in_chunks(kind: str, pooling: Pooling, tmp_path: Path) -> None:
    if kind == "llama":
        save_tiny_model(kind, tmp_path, max_position_embeddings=320)
    else:
        save_family(FAMILIES["gpt2"], tmp_path)
    names = {Pooling.CLS: "pooling_mode_cls_token", Pooling.MEAN: "pooling_mode_mean_tokens"}
    write_modules(tmp_path, {names.get(pooling, "pooling_mode_lasttoken"): True}, normalize=False)
    embedder = open_embedder(tmp_path, CpuDevice(1), dtype="float32", max_tokens=600, chunk=70)
    batch = [document[: embedder.max_length] for document in documents()]
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype="float32").eval()
    assert_independent(embedder, batch, expected(model, batch, pooling, normalize=False))


@pytest.mark.parametrize("kernels", [KernelChoice.NATIVE, KernelChoice.TORCH])
def test_a_decoder_that_embeds_keeps_no_head(kernels: KernelChoice, tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, tie_word_embeddings=False)
    device = CpuDevice(1, settings=CpuSettings(kernels))
    pooler: Any = open_embedder(tmp_path, device, dtype="float32", max_tokens=64).pooler
    whole = open_model(tmp_path, device, dtype="float32")
    head = whole.vocab_size * whole.hidden_size
    assert pooler.model.weight_bytes() + 4 * head == whole.weight_bytes()
    with pytest.raises(ValueError, match="without its head"):
        pooler.model.logits(torch.zeros(1, whole.hidden_size))


def test_a_checkpoint_with_more_than_is_used_loads_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As many on the hub: saved with the layer above [CLS] that nothing here asks.
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=6
    )
    transformers.BertModel(config, add_pooling_layer=True).save_pretrained(tmp_path)
    theirs = logging.getLogger("transformers")
    theirs.setLevel(logging.WARNING)
    theirs.addHandler(caplog.handler)
    try:
        open_embedder(tmp_path, CpuDevice(1), dtype="float32", max_tokens=64)
    finally:
        theirs.removeHandler(caplog.handler)
    assert caplog.records == []


def test_shapes_are_known_beforehand(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    device = CpuDevice(1)
    embedder = open_embedder(tmp_path, device, dtype="float32", max_tokens=512)
    embedder.warm_up()
    seen = device.execution.shapes.first_seen
    assert seen == len(embedder.shapes.all())
    rng = random.Random(1)
    for _ in range(10):
        embedder.embed([[5] * rng.randint(1, 320) for _ in range(rng.randint(1, 20))])
    assert device.execution.shapes.first_seen == seen


def test_a_document_that_overflows_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    save_family(FAMILIES["gpt2"], tmp_path)
    break_token(tmp_path, 9)
    embedder = open_embedder(tmp_path, CpuDevice(1), dtype="float32", max_tokens=512, chunk=32)
    bad, good = [5] * 40 + [9] * 20, [6] * 50
    vectors = embedder.embed([good, bad])
    assert vectors[1].isnan().all()
    torch.testing.assert_close(vectors[0], embedder.embed([good])[0], atol=TOLERANCE, rtol=0)


def test_without_files_vectors_have_length_one(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, Pooling.LAST) == PoolingSettings(Pooling.LAST, True)
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert read_pooling(tmp_path, Pooling.MEAN) == PoolingSettings(Pooling.CLS, False, 77)


@pytest.mark.parametrize(
    ("mode", "more", "text"),
    [
        ({"pooling_mode_max_tokens": True}, None, "way of pooling"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None, "way of pooling"),
        ({}, None, "way of pooling"),
        ({"pooling_mode": "weightedmean"}, None, "way of pooling"),
        ({"pooling_mode_cls_token": True}, "Dense", "module of type Dense"),
    ],
)
def test_other_ways_of_pooling_are_refused(
    mode: dict[str, Any], more: str | None, text: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, mode, normalize=True, more=more)
    with pytest.raises(ModelError, match=text):
        read_pooling(tmp_path, Pooling.MEAN)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "document 1 has 0 tokens; between 1 and 320"),
        ([5] * 321, "321 tokens"),
        ([128], "vocabulary of 128"),
        ([-1], "outside"),
    ],
)
def test_bad_documents_are_refused(document: list[int], text: str, tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    embedder = open_embedder(tmp_path, CpuDevice(1), dtype="float32")
    with pytest.raises(EmbedError, match=text):
        embedder.embed([[5], document])
    with pytest.raises(ModelError, match="max-model-len 400 exceeds the model's context of 320"):
        open_embedder(tmp_path, CpuDevice(1), max_model_len=400)


def test_every_document_has_a_shape() -> None:
    for longest in (1, 15, 16, 17, 300, 512):
        shapes = EmbedShapes(longest, 256)
        lengths = list(range(1, longest + 1)) * 2
        placed: list[int] = []
        for batch in shapes.plan(lengths):
            assert (batch.rows, batch.length) in shapes.all()
            assert len(batch.documents) <= batch.rows
            assert all(lengths[document] <= batch.length for document in batch.documents)
            placed += batch.documents
        assert sorted(placed) == list(range(len(lengths)))
        assert all(rows * length <= max(256, longest) for rows, length in shapes.all())
