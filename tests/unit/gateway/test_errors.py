"""The error envelope, the mapping of peers' errors, and API keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from catenary.config import load
from catenary.runtime import StartRefused
from catenary.v1 import common_pb2
from gateway.auth import ApiKeys, bearer_key, read_key_file, read_keys
from gateway.config import GatewayConfig
from gateway.errors import ApiError, from_wire, internal, model_not_found
from gateway.streaming.answers import sse_error_event, sse_event


def test_the_envelope_has_all_four_keys() -> None:
    error = ApiError(429, "Full.", kind="rate_limit_error", code="rate_limit_exceeded", retry_after_ms=1500)
    assert json.loads(error.body()) == {
        "error": {
            "message": "Full.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }
    assert (b"retry-after", b"2") in error.headers()
    assert (b"retry-after-ms", b"1500") in error.headers()


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (common_pb2.ERROR_CODE_INVALID_ARGUMENT, 400, "invalid_value"),
        (common_pb2.ERROR_CODE_UNSUPPORTED, 400, "unsupported_value"),
        (common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, 400, "context_length_exceeded"),
        (common_pb2.ERROR_CODE_MODEL_NOT_FOUND, 404, "model_not_found"),
        (common_pb2.ERROR_CODE_OVERLOADED, 429, "rate_limit_exceeded"),
        (common_pb2.ERROR_CODE_DRAINING, 503, "engine_unavailable"),
        (common_pb2.ERROR_CODE_UNAVAILABLE, 503, "engine_unavailable"),
        (common_pb2.ERROR_CODE_ENGINE_LOST, 503, "engine_unavailable"),
        (common_pb2.ERROR_CODE_TIMEOUT, 408, "timeout"),
        (common_pb2.ERROR_CODE_INTERNAL, 500, "internal_error"),
        (common_pb2.ERROR_CODE_UNSPECIFIED, 500, "internal_error"),
        (999, 500, "internal_error"),
    ],
)
def test_errors_of_peers(code: Any, status: int, name: str) -> None:
    error = from_wire(common_pb2.Error(code=code, message="text", param="prompt"), model="m")
    assert (error.status, error.code) == (status, name)
    if status in (429, 503):
        assert error.retry_after_ms


@pytest.mark.advisory("CVE-2026-22778")
def test_internal_errors_tell_nothing() -> None:
    wire = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="/home/x/y.py line 3")
    assert from_wire(wire).message == internal().message


def test_model_names_are_shown_cut_and_clean() -> None:
    assert model_not_found("a\r\nb" + "c" * 1000).message == f"The model 'a??b{'c' * 96}' does not exist."


@pytest.mark.parametrize(
    ("name", "served", "told"),
    [
        ("smollm2", ["smollm2-135m"], " Did you mean 'smollm2-135m'? Served models: 'smollm2-135m'."),
        ("SmolLM2-135M", ["smollm2-135m"], " Did you mean 'smollm2-135m'? Served models: 'smollm2-135m'."),
        (
            "Llama-3.1-8B",
            ["meta-llama/Llama-3.1-8B-Instruct", "x"],
            " Did you mean 'meta-llama/Llama-3.1-8B-In",
        ),
        ("meta-llama/Llama-3.1-8B-Instruct", ["llama-3.1-8b"], " Did you mean 'llama-3.1-8b'? "),
        (
            "qwen",
            ["org/qwen2-57b-instruct", "org/qwen2-7b-instruct"],
            " Did you mean 'org/qwen2-7b-instruct'? ",
        ),
        ("gpt-4", ["smollm2-135m", "x"], " Served models: 'smollm2-135m', 'x'."),
        ("x", ["xx-large-model"], " Served models: 'xx-large-model'."),
        ("", ["a"], " Served models: 'a'."),
        ("chat", [], ""),
        (
            "nope",
            [f"m{place}" for place in range(11)],
            " Served models: 'm0', 'm1', 'm2', 'm3', 'm4', 'm5', 'm6', 'm7'",
        ),
        ("a\nb", ["a\nbc"], " Did you mean 'a?bc'? Served models: 'a?bc'."),
    ],
)
def test_an_unknown_model_is_told_with_those_that_are_served(name: str, served: list[str], told: str) -> None:
    error = model_not_found(name, served)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message.startswith(f"The model '{name.replace(chr(10), '?')}' does not exist.{told}")
    assert error.message.endswith(" and 3 more.") == (len(served) == 11)


def test_events_are_one_line() -> None:
    data = sse_event({"text": "a\u2028b\u2029c\u0085d\ne 世"})
    assert data == 'data: {"text":"a\\u2028b\\u2029c\\u0085d\\ne 世"}\n\n'.encode()
    assert json.loads(data[6:])["text"] == "a\u2028b\u2029c\u0085d\ne 世"
    assert json.loads(sse_error_event(internal())[6:])["error"]["code"] == "internal_error"


@pytest.mark.advisory("CVE-2025-59425")
def test_keys_are_compared_by_digest() -> None:
    keys = ApiKeys(["one", "ключ"])
    assert keys.accepts(b"one")
    assert keys.accepts("ключ".encode())
    for wrong in (b"", b"on", b"one ", b"onee", b"' OR 1=1--", b"\xff\xfe"):
        assert not keys.accepts(wrong)
    assert not ApiKeys([])


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([("authorization", "Bearer abc")], b"abc"),
        ([("authorization", "bearer  abc ")], b"abc"),
        ([("authorization", "Basic abc")], None),
        ([("authorization", "Bearer ")], None),
        ([("authorization", "Bearer")], None),
        ([], None),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], None),
        ([("authorization", "Bearer \xe9")], b"\xe9"),
    ],
)
def test_the_key_of_a_request(headers: list[tuple[str, str]], key: bytes | None) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    assert bearer_key(Headers(raw=raw)) == key


def test_several_keys_as_flags() -> None:
    for flags in (["--api-key", "one,two"], ["--api-key", "one", "--api-key", "two"]):
        keys = read_keys(load(GatewayConfig, flags, prog="gateway").api_key, None)
        assert [keys.accepts(key) for key in (b"one", b"two", b"one,two", b"")] == [True, True, False, False]


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\n one \n\ntwo\n")
    keys = read_keys(["three"], file)
    assert all(keys.accepts(key) for key in (b"one", b"two", b"three"))
    assert not keys.accepts(b"# mine")
    file.write_text("# none\n")
    with pytest.raises(StartRefused, match="holds no key"):
        read_keys([], file)
    with pytest.raises(StartRefused, match="cannot be read"):
        read_keys([], tmp_path / "absent")


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    keys = read_keys([], file)
    assert keys.accepts(b"one")
    assert keys.accepts(b"two")
    file.write_bytes(b"\xef\xbb\xbf\n")
    with pytest.raises(StartRefused, match="holds no key"):
        read_keys([], file)


@pytest.mark.parametrize("key", ["\u200b", "a\0", "a\ufeff", "\udcff", "a\u202eb"])
def test_a_key_with_what_cannot_be_seen_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="cannot be printed"):
        read_keys(["fine", key], None)
    file = tmp_path / "keys"
    file.write_bytes(b"fine\n" + key.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(StartRefused, match="cannot be"):
        read_keys([], file)


@pytest.mark.parametrize("key", ["caf\u00e9", "voil\u00e0", "\u00e0", "\u4e45", "a b"])
def test_keys_of_any_letters_are_those_that_came(key: str) -> None:
    value = b"Bearer " + key.encode()
    found = bearer_key(Headers(raw=[(b"authorization", value)]))
    assert found is not None
    assert read_keys([key], None).accepts(found)


@pytest.mark.parametrize(
    "line", ["concurrent=4", " requests-per-minute=6 concurrent=1", "tokens-per-minute=0"]
)
def test_limits_in_a_file_without_a_key_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"one\n{line}\n")
    with pytest.raises(StartRefused, match="line 2: has limits and no key before them"):
        read_key_file(file)


def test_limits_behind_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one requests-per-minute=60 concurrent=4\n# none\ntwo\nthree tokens-per-minute=0\n")
    assert read_key_file(file) == {
        "one": {"requests_per_minute": 60, "concurrent": 4},
        "two": {},
        "three": {"tokens_per_minute": 0},
    }
    assert read_keys([], file).accepts(b"one")
    for wrong in ("secret-word", "concurrent=many", "concurrent=-1", "rps=5", "concurrent = 5"):
        file.write_text(f"one\ntwo {wrong}\n")
        with pytest.raises(StartRefused, match="line 2: behind a key may be requests-per-minute=N") as caught:
            read_key_file(file)
        assert "secret-word" not in str(caught.value)
