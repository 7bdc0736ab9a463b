"""vLLM's options of the HTTP server and of its logs."""

from __future__ import annotations

import json

from catenary.config import EMPTY_KEY
from catenary_apps.migration.launch import API_KEY, GATEWAY, UP, Launch
from catenary_apps.migration.serve.rows import Kind, ServeOption, idle, only, refuse, sets, supported

_TEST = "tests/unit/catenary/test_migration_serve.py::"
_SETS = f"{_TEST}test_option_sets_a_variable"
_LISTS = f"{_TEST}test_lists"


def _origins(launch: Launch, option: str, value: str) -> None:
    try:
        origins = json.loads(value) if value.startswith("[") else value.split(",")
    except (ValueError, RecursionError):
        raise refuse(option, value, "must be a JSON list of texts") from None
    if not all(isinstance(origin, str) and origin for origin in origins):
        raise refuse(option, value, "must be a JSON list of texts")
    launch.ask(f"{UP}CORS_ALLOW_ORIGINS", ",".join(origins))


def _api_key(launch: Launch, option: str, value: str) -> None:
    if not all(key.strip() for key in value.split(",")):
        raise refuse(option, "", EMPTY_KEY)
    launch.ask(API_KEY, value)


OPTIONS: tuple[ServeOption, ...] = (
    sets(f"{UP}HOST", "`--host`; absent: 127.0.0.1, where vLLM takes every address", _SETS, "--host"),
    sets(f"{UP}PORT", "`--port`", _SETS, "--port"),
    supported(
        _api_key,
        "`--api-key`; an empty key ends the start",
        f"{_TEST}test_an_empty_key_ends_the_start",
        "--api-key",
        kind=Kind.WORDS,
    ),
    sets(f"{UP}SSL_CERTFILE", "`--ssl-certfile`", _SETS, "--ssl-certfile"),
    sets(f"{UP}SSL_KEYFILE", "`--ssl-keyfile`", _SETS, "--ssl-keyfile"),
    sets(f"{GATEWAY}SSL_CA_CERTS", "`--ssl-ca-certs` of the gateway", _SETS, "--ssl-ca-certs"),
    supported(_origins, "`--cors-allow-origins`", _LISTS, "--allowed-origins"),
    sets(
        f"{UP}GATEWAYS",
        "`--gateways`; they listen on ports that follow one another",
        _SETS,
        "--api-server-count",
        "-asc",
    ),
    idle(
        "a model may call whenever a request brings tools, and reasoning is told apart",
        "--enable-auto-tool-choice",
        "--enable-reasoning",
        kind=Kind.FLAG,
    ),
    sets(
        f"{UP}TOOL_PARSER",
        "`--tool-parser`; absent: told by the model's chat template. The names are vLLM's; one that "
        "[the table of formats](api.md#tools) lacks is refused at the start",
        _SETS,
        "--tool-call-parser",
    ),
    sets(
        f"{UP}REASONING_PARSER",
        "`--reasoning-parser`; absent: told by the model's chat template. The names are vLLM's; one that "
        "[Reasoning](api.md#reasoning) lacks is refused at the start",
        _SETS,
        "--reasoning-parser",
    ),
    sets(
        "CATENARY_TOKENIZER_ALLOW_REQUEST_TEMPLATES",
        "`--allow-request-templates` of the tokenizer",
        _SETS,
        "--trust-request-chat-template",
        kind=Kind.FLAG,
    ),
    only(
        "parsers are part of the gateway; NVIDIA's nemotron_json and llama_nemotron_json are among them",
        (),
        "--tool-parser-plugin",
        "--reasoning-parser-plugin",
    ),
    only("a proxy in front does that", ("", "/"), "--root-path"),
    only("no code of others runs in the gateway", (), "--middleware"),
    only("answers have the role assistant", ("assistant",), "--response-role"),
    only(
        "token ids are asked for by the request", ("false",), "--return-tokens-as-token-ids", kind=Kind.FLAG
    ),
    only("a message's content is what the template asks for", ("auto",), "--chat-template-content-format"),
    idle(
        "logs never hold prompts or answers",
        "--disable-log-requests",
        "--enable-log-requests",
        "--disable-log-stats",
        "--enable-log-outputs",
        "--disable-uvicorn-access-log",
        kind=Kind.FLAG,
    ),
    idle("logs never hold prompts or answers", "--max-log-len"),
    idle(
        "`--log-level` of `catenary up`, or VLLM_LOGGING_LEVEL",
        "--uvicorn-log-level",
        "--log-config-file",
        nothing={"--uvicorn-log-level": ("info",)},
    ),
    idle("the gateway is always a process of its own", "--disable-frontend-multiprocessing", kind=Kind.FLAG),
    idle(
        "the gateway's limits are its options",
        "--max-logprobs",
        "--h11-max-incomplete-event-size",
        "--h11-max-header-count",
        nothing={
            "--max-logprobs": ("20",),
            "--h11-max-incomplete-event-size": ("4194304",),
            "--h11-max-header-count": ("256",),
        },
    ),
    idle("the gateway serves no pages", "--disable-fastapi-docs", kind=Kind.FLAG),
    idle(
        "llguidance does it, or xgrammar with `--grammar-backend` of the engine",
        "--guided-decoding-backend",
        "--structured-outputs-config",
        nothing={"--guided-decoding-backend": ("auto", "guidance")},
    ),
    only(
        "a schema itself says what may stand between and beside its values",
        ("false",),
        "--guided-decoding-disable-any-whitespace",
        "--guided-decoding-disable-additional-properties",
        kind=Kind.FLAG,
    ),
    idle("there is one way to follow a grammar", "--guided-decoding-disable-fallback", kind=Kind.FLAG),
)
