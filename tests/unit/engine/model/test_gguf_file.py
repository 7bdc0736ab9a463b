"""Headers of GGUF files: sound ones are taken, damaged and absurd ones refused in a line that says why."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.model.checks import ModelError
from services.engine.model.gguf_file import check_gguf, read_gguf_header
from services.engine.model.sources import resolve_source

U32, I32, F32, BOOL, TEXT, LIST, U64 = 4, 5, 6, 7, 8, 9, 10


def text(content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *shape: int, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", 0, offset)


PAIRS = (
    pair("general.architecture", TEXT, text("llama")),
    pair("llama.block_count", U32, struct.pack("<I", 2)),
    pair("llama.attention.head_count_kv", LIST, struct.pack("<IQ2i", I32, 2, 1, 1)),
    pair("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
    pair("tokenizer.ggml.tokens", LIST, struct.pack("<IQ", TEXT, 2) + text(b"\xff") + text("")),
    pair("tokenizer.ggml.add_bos_token", BOOL, b"\x01"),
)
TENSORS = (tensor("a", 4), tensor("b", 4, 4))


def header(
    pairs: tuple[bytes, ...] = PAIRS,
    tensors: tuple[bytes, ...] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
) -> bytes:
    found = (len(tensors), len(pairs)) if counts is None else counts
    return b"".join((magic, version, struct.pack("<QQ", *found), *pairs, *tensors))


SOUND = header()


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        check_gguf(path)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    assert len(line) < 400
    return line


def test_a_sound_header_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(SOUND)
    header = read_gguf_header(tmp_path / "a.gguf")
    assert header.tensors == {"a", "b"}
    assert header.values["general.architecture"] == "llama"
    assert header.values["llama.attention.head_count_kv"] == [1, 1]
    assert header.values["tokenizer.ggml.tokens"] == 2


def test_the_built_in_model_is_taken() -> None:
    source = resolve_source("smollm2")
    assert source.path is not None
    read_gguf_header(source.path)


DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read: it is empty"),
    "another format": (header(magic=b"PK\x03\x04"), "it does not begin with GGUF"),
    "the first version": (header(version=struct.pack("<I", 1)), "it is of version 1"),
    "big-endian": (header(version=struct.pack(">I", 3)), "it is big-endian"),
    "many tensors": (header(counts=(2**63, 1)), "it names 9223372036854775808 tensors"),
    "many pairs": (header(counts=(2, 2**40)), "it names 1099511627776 pairs of metadata"),
    "a long name": (header((struct.pack("<Q", 2**62),)), "the name of a value"),
    "a name that is no text": (header((pair(b"\xff\xfe", U32, bytes(4)),)), "is no text"),
    "a long text": (header((pair("k", TEXT, struct.pack("<Q", 2**50)),)), "'k' is 1125899906842624 bytes"),
    "a long list": (header((pair("k", LIST, struct.pack("<IQ", U64, 2**60)),)), "cut short in 'k'"),
    "a long list of texts": (header((pair("k", LIST, struct.pack("<IQ", TEXT, 2**60)),)), "'k' has"),
    "an unknown type": (header((pair("k", 99, b""),)), "unknown type 99"),
    "lists in lists": (
        header((pair("k", LIST, struct.pack("<IQ", LIST, 1) * 100),)),
        "'k' has a value of the unknown type 9",
    ),
    "many layers": (
        header((pair("llama.block_count", U32, struct.pack("<I", 4_000_000_000)),)),
        "llama.block_count is 4000000000, and must be a whole number from 1 to 10000",
    ),
    "more layers than tensors": (
        header((pair("qwen2.block_count", U32, struct.pack("<I", 40)),)),
        "qwen2.block_count is 40, and it has 2 tensors in all",
    ),
    "no width": (
        header((pair("llama.embedding_length", U32, struct.pack("<I", 0)),)),
        "llama.embedding_length is 0",
    ),
    "a negative head": (
        header((pair("llama.attention.head_count_kv", LIST, struct.pack("<IQ2i", I32, 2, 1, -1)),)),
        "llama.attention.head_count_kv is -1",
    ),
    "a base that is no number": (
        header((pair("llama.rope.freq_base", F32, struct.pack("<f", float("nan"))),)),
        "llama.rope.freq_base is nan",
    ),
    "many dimensions": (header(tensors=(text("a") + struct.pack("<I", 900), TENSORS[1])), "900 dimensions"),
    "a large tensor": (header(tensors=(tensor("a", 2**60), TENSORS[1])), "tensor 'a' is larger than any"),
    "weights that are missing": (
        header(tensors=(tensor("a", 4, offset=10**9), TENSORS[1])),
        "it is cut short",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_header_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    data, words = DAMAGES[name]
    assert words in refusal(tmp_path / "a.gguf", data)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, len(SOUND) - 1))
def test_a_header_that_is_cut_anywhere_is_refused(tmp_path: Path, size: int) -> None:
    refusal(tmp_path / "a.gguf", SOUND[:size])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(4, len(SOUND) - 8), st.binary(min_size=1, max_size=8)), max_size=4)
)
def test_any_bytes_are_taken_or_refused_in_one_line(tmp_path: Path, changes: Any) -> None:
    data = bytearray(SOUND)
    for at, written in changes:
        data[at : at + len(written)] = written
    (tmp_path / "a.gguf").write_bytes(data)
    try:
        read_gguf_header(tmp_path / "a.gguf")
    except ModelError as error:
        line = str(error)
    else:
        line = "taken"
    assert "\n" not in line
    assert len(line) < 500
