"""Parameters that are known and cannot be honoured yet.

One rule: a known parameter is refused with 400 and its name, unless its value asks for nothing (null, or
what would happen anyway). A parameter that is not known at all is refused too. Nothing is ever ignored in
silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.errors import ApiError, bad_request

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
    """`body` without the known parameters that ask for nothing.

    Raises ApiError for any other known one; it names the parameter's counterpart if there is one.
    """
    kept = {}
    for name, value in body.items():
        if name not in known:
            kept[name] = value
        elif value is not None and not among(value, known[name]):
            raise unsupported_parameter(prefix + name, counterparts.get(name))
    return kept


def unsupported_parameter(param: str, counterpart: str | None = None) -> ApiError:
    """400 that names a parameter which this server does not support, and what it has in its place."""
    end = " yet." if counterpart is None else f": use '{counterpart}'."
    return bad_request(
        f"The parameter '{param}' is not supported by this server{end}", param, "unsupported_parameter"
    )


def among(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether a JSON value is one of some."""
    # 0 == False in Python; in JSON they are different things.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
