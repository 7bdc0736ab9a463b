from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from catenary_apps.cli.chat import (
    ChatConfig,
    ChatError,
    converse,
    first_model,
    run_chat,
    show_answer,
    through_proxy,
    trusted,
)
from tests.support.certificates import make_authority

Handler = Callable[[httpx2.Request], httpx2.Response]


def client_for(handler: Handler) -> httpx2.Client:
    return httpx2.Client(base_url="http://server", transport=httpx2.MockTransport(handler))


def stream(*events: object) -> httpx2.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx2.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def delta(text: str | None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def test_answer_is_streamed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    bodies: list[dict[str, object]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return stream(delta(None), delta("Par"), delta("is"), {"choices": [], "usage": {}})

    config = ChatConfig(temperature=0, max_tokens=5)
    assert show_answer(client_for(handler), config, "m", [{"role": "user", "content": "?"}]) == "Paris"
    assert capsys.readouterr().out == "Paris\n"
    assert bodies[0]["temperature"] == 0
    assert bodies[0]["max_tokens"] == 5
    assert bodies[0]["stream"] is True


def test_conversation_keeps_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append([message["content"] for message in json.loads(request.content)["messages"]])
        return stream(delta("yes"))

    lines = iter(["one", "", "two", "/new", "three", "/quit", "four"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    converse(client_for(handler), ChatConfig(system="be brief"), "m")
    assert seen == [["be brief", "one"], ["be brief", "one", "yes", "two"], ["be brief", "three"]]


def test_a_mistyped_command_is_no_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content)["messages"][-1]["content"])
        return stream(delta("yes"))

    lines = iter(["/foo", "/hlep", "/etc/hosts", "/ is a slash", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    converse(client_for(handler), ChatConfig(), "m")
    assert seen == ["/etc/hosts", "/ is a slash"]
    assert capsys.readouterr().out.startswith("/foo is no command. /quit ends")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_loopback_is_never_reached_through_a_proxy(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for proxy in ("http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense"):
        monkeypatch.setenv(variable, proxy)
        assert run_chat(["--base-url", "http://127.0.0.1:1"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("catenary chat: no answer from http://127.0.0.1:1: ")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a:b", "http://", "", "ftp://x", "a b", "http://h/?q", "h:0"]
)
def test_a_base_url_that_is_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_chat([f"--base-url={url}"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"catenary chat: --base-url {url!r}: expected the URL of a server, such as http://127.0.0.1:8000\n"
    )


def test_a_password_in_a_base_url_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_chat(["--base-url", "http://me:hunter2@server"])
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "written", ["127.0.0.1:1", "localhost:1", "//127.0.0.1:1", "127.0.0.1:1/v1", "[::1]:1/"]
)
def test_a_base_url_needs_no_scheme(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat(["--base-url", written]) == 1
    base = written.lstrip("/").rstrip("/").removesuffix("/v1")
    assert capsys.readouterr().err.startswith(f"catenary chat: no answer from http://{base}: ")


@pytest.mark.parametrize(
    ("url", "no_proxy", "told"),
    [
        ("http://server.test:1", "", True),
        ("http://server.test:1", "other.test", True),
        ("http://server.test:1", "server.test", False),
        ("http://server.test:1", "*", False),
        ("http://0.0.0.0:1", "", False),
        ("http://[::]:1", "", False),
    ],
)
def test_a_proxy_that_is_passed_by_is_not_blamed(
    url: str, no_proxy: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", no_proxy)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert through_proxy(url) == (" (through the proxy of HTTP_PROXY)" if told else "")


@pytest.mark.parametrize(
    ("headers", "sent"), [({}, "was not sent"), ({"Authorization": "Bearer k"}, "was sent")]
)
def test_a_key_that_is_missing_is_asked_for(headers: dict[str, str], sent: str) -> None:
    client = client_for(lambda _: httpx2.Response(401, json={"error": {"message": "Wrong key."}}))
    client.headers.update(headers)
    with pytest.raises(ChatError) as refused:
        first_model(client)
    assert str(refused.value) == f"Wrong key. (a key {sent}; CATENARY_CHAT_API_KEY or --api-key carries one)"


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense"])
def test_a_proxy_that_is_used_is_named(
    proxy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert run_chat(["--base-url", "http://server.test:1"]) == 1
    error = capsys.readouterr().err
    assert " (through the proxy of ALL_PROXY): " in error
    assert error.count("\n") == 1


def test_ctrl_c_keeps_what_came(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(client: httpx2.Client, body: dict[str, object]) -> object:
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr("catenary_apps.cli.chat.stream_answer", interrupted)
    assert show_answer(client_for(lambda _: stream()), ChatConfig(), "m", []) == "half"
    assert capsys.readouterr().out == "half\n"


def test_refusal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = httpx2.Response(400, json={"error": {"message": "temperature must be at most 2"}})
    assert show_answer(client_for(lambda _: refusal), ChatConfig(), "m", []) == ""
    assert "temperature must be at most 2" in capsys.readouterr().err


def test_error_inside_the_stream_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    response = stream(delta("a"), {"error": {"message": "the engine was lost"}})
    assert show_answer(client_for(lambda _: response), ChatConfig(), "m", []) == "a"
    assert "the engine was lost" in capsys.readouterr().err


def test_authorities_of_https(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trusted(ChatConfig()) is True
    assert trusted(ChatConfig(insecure=True)) is False
    make_authority(tmp_path, "ours")
    context = trusted(ChatConfig(ca_file=tmp_path / "ours.pem"))
    assert isinstance(context, ssl.SSLContext)
    assert len(context.get_ca_certs()) == 1
    (tmp_path / "empty.pem").touch()
    for name in ("missing.pem", "empty.pem", "."):
        assert run_chat(["--ca-file", str(tmp_path / name)]) == 2
        assert re.fullmatch(r"catenary chat: --ca-file: .+: .+\n", capsys.readouterr().err)


def test_first_model() -> None:
    assert first_model(client_for(lambda _: httpx2.Response(200, json={"data": [{"id": "m"}]}))) == "m"
    with pytest.raises(ChatError, match="lists no model"):
        first_model(client_for(lambda _: httpx2.Response(200, json={"data": []})))
    with pytest.raises(ChatError, match="answered 502"):
        first_model(client_for(lambda _: httpx2.Response(502, text="<html>")))
