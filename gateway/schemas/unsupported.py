"""Parameters that are known and cannot be honoured yet.

One rule: a known parameter is refused with 400 and its name, unless its value asks for nothing (null, or
what would happen anyway). A parameter that is not known at all is refused too. Nothing is ever ignored in
silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import ApiError, bad_request

_OFF: tuple[Any, ...] = ()
"""Only null is neutral."""

_SAMPLING: dict[str, Sequence[Any]] = {
    "logits_processors": ([],),
    "token_ids_logprob": _OFF,
    "thinking_token_budget": _OFF,
}
_OUTPUT: dict[str, Sequence[Any]] = {
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": _OFF,
    "structural_tag": _OFF,
}
_SYSTEM: dict[str, Sequence[Any]] = {
    "request_id": _OFF,
    "kv_transfer_params": _OFF,
    "vllm_xargs": _OFF,
    "prompt_embeds": _OFF,
}

COMMON: Mapping[str, Sequence[Any]] = {**_SAMPLING, **_OUTPUT, **_SYSTEM}

CHAT: Mapping[str, Sequence[Any]] = {
    **COMMON,
    "audio": _OFF,
    "modalities": (["text"],),
    "prediction": _OFF,
    "reasoning": _OFF,
    "verbosity": ("medium",),
    "store": (False,),
    "moderation": _OFF,
    "web_search_options": _OFF,
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "echo": (False,),
}

COMPLETION: Mapping[str, Sequence[Any]] = {
    **COMMON,
    "suffix": _OFF,
    "store": (False,),
}

TOKENIZE: Mapping[str, Sequence[Any]] = {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}

RESPONSES: Mapping[str, Sequence[Any]] = {
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
    "max_tool_calls": _OFF,
    "moderation": _OFF,
    "n": (1,),
    "personality": _OFF,
    "prompt": _OFF,
    "prompt_cache_options": _OFF,
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "enable_response_messages": (False,),
    "previous_input_messages": _OFF,
    "prompt_logprobs": _OFF,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "request_id": _OFF,
    "vllm_xargs": _OFF,
}


def drop_neutral(
    body: dict[str, Any], known: Mapping[str, Sequence[Any]], prefix: str = ""
) -> dict[str, Any]:
    """`body` without the known parameters that ask for nothing. Raises ApiError for any other known one."""
    kept = {}
    for name, value in body.items():
        if name not in known:
            kept[name] = value
        elif value is not None and not _among(value, known[name]):
            raise unsupported_parameter(prefix + name)
    return kept


def unsupported_parameter(param: str) -> ApiError:
    """400 that names a parameter which this server does not support."""
    return bad_request(
        f"The parameter '{param}' is not supported by this server yet.", param, "unsupported_parameter"
    )


def _among(value: Any, neutral: Sequence[Any]) -> bool:
    # 0 == False in Python; in JSON they are different things.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
