"""Request fields without effect: their list, and the header that names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_not
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError, bad_request

IGNORED = "x-catenary-ignored"
# Of a response header: proxies and clients take some KiB of headers, so it stays below four.
MAX_NAMES = 32
_MAX_NAME_LENGTH = 100
_MORE = "..."
_KEY = "catenary.ignored"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def field_path(parts: Sequence[int | str], most: int = 8) -> str:
    """Return `messages.0.content`: a field by the names and places that lead to it, at most `most` of them.

    Characters that cannot be part of a name are replaced."""
    shown = [part if _NAME.fullmatch(part) else "?" for part in map(str, parts[:most])]
    return ".".join(shown)[:_MAX_NAME_LENGTH]


class IgnoredFields:
    """Fields of a request without effect. `lenient`: unknown fields are ignored, not refused."""

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self._names: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """Fields in the order in which they were found, each once; a last one, `...`, stands for more."""
        return list(self._names)

    def note(self, *parts: int | str) -> None:
        """Record a field, by its path."""
        if len(self._names) < MAX_NAMES:
            self._names[field_path(parts)] = None
        else:
            self._names[_MORE] = None


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored", default=None)


def current_ignored() -> IgnoredFields:
    """Return the ignored fields of this task's request; outside of a request, a new empty record."""
    found = _current.get()
    return IgnoredFields() if found is None else found


@contextmanager
def noting(ignored: IgnoredFields) -> Iterator[IgnoredFields]:
    """Note in `ignored` the fields ignored inside, and in tasks made there."""
    token = _current.set(ignored)
    try:
        yield ignored
    finally:
        _current.reset(token)


class IgnoredFieldsLayer:
    """ASGI middleware: each request has its own ignored fields, which `ignored_header` finds in its scope.

    The header is added where an answer's head is written (RequestContext): a middleware that wrapped `send`
    would be called for every chunk of a stream.
    """

    def __init__(self, app: ASGIApp, *, lenient: bool) -> None:
        self._app = app
        self._lenient = lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = scope[_KEY] = IgnoredFields(lenient=self._lenient)
        with noting(ignored):
            await self._app(scope, receive, send)


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the header that names the fields ignored so far; empty if there are none."""
    found: IgnoredFields | None = scope.get(_KEY)
    if found is None or not found.names:
        return []
    return [(IGNORED.encode(), ", ".join(found.names).encode())]


_OFF: tuple[Any, ...] = ()
"""Only null is neutral."""

_SAMPLING: dict[str, Sequence[Any]] = {
    "logits_processors": ([],),
    "token_ids_logprob": ([],),
    "thinking_token_budget": _OFF,
}
_OUTPUT: dict[str, Sequence[Any]] = {
    "guided_whitespace_pattern": ("",),
    "structural_tag": ("",),
}
_SYSTEM: dict[str, Sequence[Any]] = {
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "prompt_embeds": ("", []),
}

# Other servers' ways to change an answer, each with the values that leave it as it is.
_OTHERS: dict[str, Sequence[Any]] = {
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": ("",),
    "grammar": ("",),
    "json_schema": (),
    "lora": ([],),
    "lora_path": ("",),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "regex": ("",),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "return_hidden_states": (False,),
    "samplers": ([],),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "stream_reasoning": (True,),
    "t_max_predict_ms": (0,),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "typ_p": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}

OTHERS_COUNTERPARTS: Mapping[str, str] = {
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "structured_outputs.json",
    "n_predict": "max_tokens",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
}
"""Parameters of other servers that have another name here, with that name."""

COMMON: Mapping[str, Sequence[Any]] = {**_SAMPLING, **_OUTPUT, **_SYSTEM, **_OTHERS}

CHAT: Mapping[str, Sequence[Any]] = {
    **COMMON,
    "audio": _OFF,
    "modalities": (["text"], []),
    "reasoning": _OFF,
    "moderation": _OFF,
    "web_search_options": _OFF,
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "echo": (False,),
}

COMPLETION: Mapping[str, Sequence[Any]] = {
    **COMMON,
    "suffix": ("",),
}

TOKENIZE: Mapping[str, Sequence[Any]] = {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}

RESPONSES: Mapping[str, Sequence[Any]] = {
    **_OTHERS,
    "access_programs": _OFF,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "background_options": _OFF,
    "best_of": (1,),
    "context_management": ([],),
    "continue_final_message": (False,),
    "conversation": _OFF,
    "early_stopping": (False,),
    "image": _OFF,
    "length_penalty": (1,),
    "moderation": _OFF,
    "n": (1,),
    "personality": _OFF,
    "prompt": _OFF,
    "enable_response_messages": (False,),
    "previous_input_messages": _OFF,
    "prompt_logprobs": _OFF,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "thinking_token_budget": _OFF,
}


def drop_neutral(
    body: dict[str, Any],
    known: Mapping[str, Sequence[Any]],
    prefix: str = "",
    counterparts: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return `body` without the known parameters that have neutral values.

    Raises ApiError for any other known one; it names the parameter's counterpart if there is one."""
    kept = {}
    for name, value in body.items():
        if name not in known:
            kept[name] = value
        elif value is not None and not among(value, known[name]):
            raise unsupported_parameter(prefix + name, counterparts.get(name))
    return kept


def unsupported_parameter(param: str, counterpart: str | None = None) -> ApiError:
    """Return 400 that names an unsupported parameter, and its counterpart here."""
    end = " yet." if counterpart is None else f": use '{counterpart}'."
    return bad_request(
        f"The parameter '{param}' is not supported by this server{end}", param, "unsupported_parameter"
    )


def among(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether a JSON value is one of some."""
    # 0 == False in Python; in JSON they are different things.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


EACH = "*"
Tree = Mapping[str, Any]
"""Names of fields, and the tree below each (`*`: each item); for a field that is ignored itself, its neutral
values."""


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """Fields at `paths` (`messages.*.cache_control`), of the project `of`, for the reason `why`.

    neutral: values without effect, which are not reported; null never is."""

    paths: tuple[str, ...]
    of: str
    why: str
    neutral: tuple[Any, ...] = ()


EVERYWHERE = (
    IgnoredField(
        ("request_id", "rid"),
        "vLLM, SGLang",
        "names the request in logs; here the header `x-request-id` does",
    ),
    IgnoredField(
        ("data_parallel_rank", "routed_dp_rank"), "vLLM, SGLang", "chooses an engine; the router does"
    ),
    IgnoredField(("log_metrics", "custom_labels"), "SGLang", "for its metrics"),
    IgnoredField(
        (
            *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id"),
            *("tags", "num_retries", "cache_control_injection_points"),
        ),
        "LiteLLM",
        "for its own proxy",
    ),
    IgnoredField(("chat_id", "session_id"), "Open WebUI", "its own books; `x-session-id` names a session"),
    IgnoredField(("client_metadata",), "Codex", "its own books"),
    IgnoredField(
        ("usage", "transforms", "provider", "route"), "OpenRouter", "its choice of a host, and its bill"
    ),
    IgnoredField(
        ("prompt_cache_retention", "prompt_cache_options"),
        "OpenAI",
        "how long a cache keeps a prompt",
        ("in_memory", "in-memory", {}),
    ),
)
GENERATION = (
    *EVERYWHERE,
    IgnoredField(
        ("cache_prompt", "id_slot", "slot_id", "n_cache_reuse", "n_keep", "n_discard"),
        "llama.cpp",
        "its slots and their caches; prompts are always cached, and nothing is ever discarded",
    ),
    IgnoredField(
        ("timings_per_token", "return_progress"), "llama.cpp", "reports on the work; `/metrics` has them"
    ),
    IgnoredField(
        (
            *("dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta"),
            *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        ),
        "llama.cpp",
        "details of ways to sample that are off: what would turn one on is refused",
    ),
    IgnoredField(("backend_sampling",), "llama.cpp", "which device samples; the server's choice"),
    IgnoredField(
        ("guided_decoding_backend",),
        "vLLM",
        "which library follows a constraint; the server's choice",
        ("auto",),
    ),
    IgnoredField(("prediction",), "OpenAI", "a guess at the answer that may make it quicker, never another"),
)
_STORE = IgnoredField(
    ("store",), "OpenAI", "keeps the answer for its dashboard; only responses are stored", (False,)
)
_TOOLS = IgnoredField(
    (
        *("tools.*.cache_control", "tools.*.function.cache_control", "functions.*.cache_control"),
        *("tools.*.provider_specific_fields", "tools.*.function.provider_specific_fields"),
    ),
    "LiteLLM, OpenRouter",
    "marks for caches and for other hosts",
)
_MESSAGES = IgnoredField(
    (
        *("cache_control", "messages.*.cache_control", "messages.*.content.*.cache_control"),
        *("messages.*.tool_calls.*.cache_control", "messages.*.provider_specific_fields"),
        *(
            "messages.*.content.*.provider_specific_fields",
            "messages.*.tool_calls.*.provider_specific_fields",
        ),
        "messages.*.tool_calls.*.function.provider_specific_fields",
        "messages.*.tool_calls.*.extra_content",
    ),
    "LiteLLM, OpenRouter",
    "marks for caches and for other hosts",
)
_SIGNED = IgnoredField(
    ("messages.*.thinking_blocks", "messages.*.reasoning_details"),
    "LiteLLM, OpenRouter",
    "reasoning in the form of its maker, which also stands in `reasoning_content`",
)
_ITEMS = IgnoredField(
    (
        *("cache_control", "input.*.cache_control", "input.*.content.*.cache_control"),
        *("input.*.output.*.cache_control", "input.*.provider_specific_fields", "tools.*.cache_control"),
    ),
    "LiteLLM, OpenRouter",
    "marks for caches and for other hosts",
)
_VERBOSITY = IgnoredField(
    ("verbosity",), "OpenAI", "a wish that OpenAI's own models were trained to heed", ("medium",)
)
_TEXT_VERBOSITY = IgnoredField(("text.verbosity",), _VERBOSITY.of, f"{_VERBOSITY.why}; told again")

COMPLETION_FIELDS = (*GENERATION, _STORE)
CHAT_FIELDS = (*GENERATION, _STORE, _VERBOSITY, _MESSAGES, _SIGNED, _TOOLS)
RESPONSE_FIELDS = (*GENERATION, _ITEMS)
CHAT_EMBEDDING_FIELDS = (*EVERYWHERE, _MESSAGES, _SIGNED, _TOOLS)


def tree_of(fields: Sequence[IgnoredField]) -> Tree:
    """Return the same fields as a tree from the body down."""
    root: dict[str, Any] = {}
    for field in fields:
        for path in field.paths:
            *way, name = path.split(".")
            node = root
            for part in way:
                node = node.setdefault(part, {})
            node[name] = field.neutral
    return root


def without_ignored(body: dict[str, Any], tree: Tree, most_items: int) -> dict[str, Any]:
    """Return `body` without the fields of `tree`, which are noted as ignored unless they are null.

    `most_items`: items that the arrays of a valid request have together. A longer array is left as it is: its
    reader refuses it by its length, and the loop is not blocked before."""
    found: dict[str, Any] = _Sieve(most_items).without(body, tree, ())
    return found


class _Sieve:
    """Filter of the ignored fields of one request."""

    def __init__(self, most_items: int) -> None:
        self._left = most_items

    def without(self, value: Any, tree: Tree, path: tuple[int | str, ...]) -> Any:
        """Return `value`, which stands at `path`; itself if no field of it is left out."""
        if isinstance(value, list):
            below = tree.get(EACH)
            if below is None or len(value) > self._left:
                return value
            self._left -= len(value)
            items = [self.without(item, below, (*path, place)) for place, item in enumerate(value)]
            return items if any(map(is_not, items, value)) else value
        return self._of_object(value, tree, path) if isinstance(value, dict) else value

    def _of_object(self, value: dict[str, Any], tree: Tree, path: tuple[int | str, ...]) -> dict[str, Any]:
        kept = value
        for name in filter(value.__contains__, tree):
            below, item = tree[name], value[name]
            if not isinstance(below, tuple):
                made = self.without(item, below, (*path, name))
                if made is item:
                    continue
            elif item is not None and not among(item, below):
                current_ignored().note(*path, name)
            if kept is value:
                kept = dict(value)
            if isinstance(below, tuple):
                del kept[name]
            else:
                kept[name] = made
        return kept


_SOMETIMES = (
    (
        "`reasoning_effort`, `reasoning.effort`, `thinking`, `think`, "
        "`chat_template_kwargs.enable_thinking`, `chat_template_kwargs.thinking`",
        "vLLM, SGLang, LiteLLM",
        "where the model's chat template reads neither efforts nor a switch for thinking",
    ),
    (
        "`stream_options.include_obfuscation: true`",
        "OpenAI",
        "nothing is added to events to hide their sizes",
    ),
)
_IN_RESPONSES = (
    (
        "`include.N`: `reasoning.encrypted_content`, and everything of built-in tools",
        "OpenAI",
        "reasoning is told in the open; the others never occur",
    ),
    ("`reasoning.summary`, `reasoning.generate_summary`", "OpenAI", "no summaries are made; told again"),
    ("`tools.N`, `tool_choice.tools.N` of a type other than `function`", "OpenAI, Codex", "not offered"),
)


def fields_markdown() -> str:
    """Return the tables of docs/fields.md."""
    generation = [field for field in GENERATION if field not in EVERYWHERE]
    sections: list[tuple[str, list[tuple[str, str, str]]]] = [
        ("Every route that asks a model", _rows(EVERYWHERE)),
        ("Chats, completions and responses", _rows(generation)),
        ("Chats and completions", _rows([_STORE])),
        ("Chats", _rows([_VERBOSITY, _MESSAGES, _SIGNED, _TOOLS])),
        ("Responses", [*_rows([_ITEMS, _TEXT_VERBOSITY]), *_IN_RESPONSES]),
        ("By the model or the value", list(_SOMETIMES)),
    ]
    parts = []
    for title, rows in sections:
        lines = [f"## {title}", "", "| field | sent by | why nothing is lost |", "| --- | --- | --- |"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _rows(fields: Sequence[IgnoredField]) -> list[tuple[str, str, str]]:
    return [(", ".join(f"`{path}`" for path in field.paths), field.of, field.why) for field in fields]
