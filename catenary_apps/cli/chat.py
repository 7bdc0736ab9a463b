"""`catenary chat`: a conversation with a server of the OpenAI API, in the terminal."""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from pydantic import Field, field_validator

from catenary.addresses import server_url
from catenary.config import ConfigError, ServiceConfig, env_name, load, settings

if TYPE_CHECKING:
    import httpx2

HELP = "/quit ends the conversation, /new starts another, Ctrl-C stops an answer"
CONNECT_TIMEOUT_S = 10.0
# A line that is meant as a command: one word behind a slash, which is no path.
COMMAND = re.compile(r"/[A-Za-z?]+")


class ChatConfig(ServiceConfig):
    """Talk to a server from the terminal."""

    model_config = settings(prefix="CATENARY_CHAT_")

    base_url: str = Field(default="http://127.0.0.1:8000", description="URL of the server, or HOST:PORT.")
    model: str | None = Field(default=None, description="Model to talk to (default: the server's first).")
    api_key: str | None = Field(
        default=None, description="API key to send; other users of this machine can read a flag."
    )
    system: str | None = Field(default=None, description="System message.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="Sampling temperature.")
    max_tokens: int | None = Field(default=None, ge=1, description="Longest answer in tokens.")
    ca_file: Path | None = Field(default=None, description="Authorities for HTTPS instead of the system's.")
    insecure: bool = Field(default=False, description="Accept any HTTPS certificate.")

    @field_validator("base_url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        return server_url(value)


class ChatError(Exception):
    """The server's refusal, or its absence, in one line."""


def run_chat(argv: Sequence[str]) -> int:
    """Talk until the end of the input: 1 if the server does not answer, or refuses; 2 for wrong options."""
    config = load(ChatConfig, argv, prog="catenary chat")
    # Not before: a wrong option is to be refused without waiting for the HTTP client to load.
    import httpx2

    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
    base = config.base_url.removesuffix("/v1")
    try:
        verify = trusted(config)
        # This machine is never on the other side of a proxy.
        proxied = not is_this_machine(base)
        with httpx2.Client(
            base_url=base, headers=headers, timeout=timeout, verify=verify, trust_env=proxied
        ) as client:
            model = config.model or first_model(client)
            print(f"{model} at {base}. {HELP}", file=sys.stderr)
            converse(client, config, model)
    except ConfigError as error:
        print(f"catenary chat: {error}", file=sys.stderr)
        return error.exit_code
    except ChatError as error:
        print(f"catenary chat: {error}", file=sys.stderr)
        return 1
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        print(f"catenary chat: no answer from {base}{through_proxy(base)}: {error}", file=sys.stderr)
        return 1
    except (ImportError, ValueError) as error:
        # A proxy of a kind that httpx2 has no support for, or that is no URL.
        print(f"catenary chat: {base} cannot be reached{through_proxy(base)}: {error}", file=sys.stderr)
        return 1
    return 0


def is_this_machine(url: str) -> bool:
    """Return whether the URL's host is this machine: its loopback, or 0.0.0.0, which servers listen on."""
    host = urlsplit(url).hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def through_proxy(url: str) -> str:
    """Return which variable of the environment sends requests for `url` through a proxy, as a remark."""
    parts = urlsplit(url)
    # What no_proxy names is reached directly.
    if is_this_machine(url) or proxy_bypass(parts.netloc):
        return ""
    names = (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    name = next((name for name in names if os.environ.get(name)), None)
    return f" (through the proxy of {name})" if name else ""


def trusted(config: ChatConfig) -> ssl.SSLContext | bool:
    """Return which certificates are accepted. Raises ConfigError for a file that holds no authority."""
    if config.insecure or config.ca_file is None:
        return not config.insecure
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:
        raise ConfigError(
            f"--ca-file: {config.ca_file}: {error.strerror or 'holds no certificate'}"
        ) from None


def first_model(client: httpx2.Client) -> str:
    """Return the name of the first model in the server's list that generates."""
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ChatError(refusal_text(response))
    models = response.json().get("data", [])
    # Other servers do not say what a model is for.
    names = [model["id"] for model in models if "generate" in model.get("tasks", ["generate"])]
    if not names:
        raise ChatError("the server lists no model that generates")
    return str(names[0])


def converse(client: httpx2.Client, config: ChatConfig, model: str) -> None:
    """Read lines and stream the answers until /quit or the end of the input."""
    opening = [{"role": "system", "content": config.system}] if config.system else []
    messages = list(opening)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            messages = list(opening)
        elif text in ("/help", "/?"):
            print(HELP)
        elif COMMAND.fullmatch(text):
            print(f"{text} is no command. {HELP}")
        elif text:
            messages.append({"role": "user", "content": text})
            if answer := show_answer(client, config, model, messages):
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


def show_answer(client: httpx2.Client, config: ChatConfig, model: str, messages: list[dict[str, str]]) -> str:
    """Print an answer as it comes and return it; Ctrl-C ends it and keeps what came."""
    body: dict[str, object] = {"model": model, "messages": messages, "stream": True}
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if config.max_tokens is not None:
        body["max_tokens"] = config.max_tokens
    pieces: list[str] = []
    # Leaving the stream closes the connection, by which the server knows to stop generating.
    with suppress(KeyboardInterrupt):
        try:
            for piece in stream_answer(client, body):
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except ChatError as error:
            print(f"! {error}", file=sys.stderr)
    print()
    return "".join(pieces)


def stream_answer(client: httpx2.Client, body: dict[str, object]) -> Iterator[str]:
    """Yield the pieces of text of one streamed chat completion. Raises ChatError."""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ChatError(refusal_text(response))
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"].get("message", "the server failed"))
            for choice in event.get("choices", []):
                yield choice.get("delta", {}).get("content") or ""


def refusal_text(response: httpx2.Response) -> str:
    """Return the message of an OpenAI error body, or the status; of a 401 also how a key is given."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = f"the server answered {response.status_code}"
    if response.status_code != HTTPStatus.UNAUTHORIZED:
        return text
    sent = "was sent" if "authorization" in response.request.headers else "was not sent"
    return f"{text} (a key {sent}; {env_name(ChatConfig, 'api_key')} or --api-key carries one)"
