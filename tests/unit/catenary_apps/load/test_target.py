from __future__ import annotations

import json
from typing import Any

import pytest

from catenary_apps.load import Endpoint, Target, Turn
from catenary_apps.load.load import Session


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://a.example:8000", "a.example", 8000, "/v1/models"),
        ("http://a.example/v1/", "a.example", 80, "/v1/models"),
        ("https://a.example/deep/v1", "a.example", 443, "/deep/v1/models"),
        ("http://[::1]:9/", "::1", 9, "/v1/models"),
    ],
)
def test_a_base_url_is_a_host_and_a_path(url: str, host: str, port: int, path: str) -> None:
    target = Target(base_url=url)
    assert (target.host, target.port, target.path("/v1/models")) == (host, port, path)
    assert (target.context() is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        *("", "a.example", "ftp://a", "http://", "http://a:x", "http://a/?b", "http://u:p@a"),
        *("http://a..b", f"http://{'a' * 64}.b", "http://a/b c", "http://a/\r\nX: y", "http://a/\udcff"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Target(base_url=url)


def test_a_head_has_the_key_and_the_headers_of_the_caller() -> None:
    target = Target(base_url="http://a:1", api_key="hidden", headers={"X-A": "b", "accept": "c"})
    head = target.head("POST", "/v1/x", 3).decode()
    assert head.startswith("POST /v1/x HTTP/1.1\r\nHost: a:1\r\n")
    assert "Authorization: Bearer hidden\r\n" in head
    assert "X-A: b\r\naccept: c\r\n\r\n" in head
    assert head.lower().count("accept") == 1
    assert "hidden" not in repr(target)


@pytest.mark.parametrize(
    "fields",
    [
        *({"headers": {"a\r\nb": "c"}}, {"headers": {"a": "b\r\nc"}}, {"headers": {"": "b"}}),
        *({"headers": {"a b": "c"}}, {"api_key": "a\nb"}, {"timeout_s": 0}),
        *({"headers": {"content-length": "3"}}, {"headers": {"Transfer-Encoding": "chunked"}}),
        *({"headers": {"a": "\udcff"}}, {"api_key": "\udcff"}, {"model": "\udcff"}),
    ],
)
def test_what_would_break_a_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Target(**fields)


def _asked(session: Session, *turns: tuple[str | tuple[int, ...], str]) -> list[dict[str, Any]]:
    bodies = []
    for prompt, answer in turns:
        bodies.append(json.loads(session.ask(Turn(prompt, 5))))
        session.answered(answer)
    return bodies


def test_a_completion_goes_on_with_the_text() -> None:
    session = Session(Target(extra_body={"top_k": 3}), "m", strict_lengths=True)
    first, second = _asked(session, ("a", "b"), ("c", "d"))
    assert (first["prompt"], second["prompt"]) == ("a", "abc")
    assert first == {
        "model": "m",
        "prompt": "a",
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }


def test_a_chat_has_all_messages_so_far_and_the_caller_has_the_last_word() -> None:
    extra = {"stream_options": None, "max_tokens": None, "max_completion_tokens": 9}
    session = Session(Target(endpoint=Endpoint.CHAT, extra_body=extra), "m", strict_lengths=False)
    _, second = _asked(session, ("a", "b"), ("c", "d"))
    assert [message["content"] for message in second["messages"]] == ["a", "b", "c"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert set(second) == {"model", "messages", "stream", "max_completion_tokens"}


def test_ids_are_sent_as_they_are() -> None:
    session = Session(Target(), "m", strict_lengths=False)
    assert json.loads(session.ask(Turn((1, 2), None))) == {
        "model": "m",
        "prompt": [1, 2],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
