"""The arguments of an LLM's calls: prompts, chats, texts and parameters, each checked and by itself.

A value of a wrong kind is a TypeError, which names the parameter, the place in it, and what is taken.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from catenary.nearest import near
from catenary.parameters import UnknownNameError
from catenary_apps.llm.sampling_params import PoolingParams, SamplingParams

P = TypeVar("P")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Message = Mapping[str, Any]
Chat = str | Sequence[Message]
"""Messages as in the API, or one text, which a user says."""

_PROMPT = "a text, a list of token ids, or an object with prompt or prompt_token_ids"
_MESSAGE = "an object with role and content"
_CHAT = f"a text or a list of messages, each {_MESSAGE}"
_UNFIT = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
# What a prompt of vLLM's may have beside its text or ids.
_PARTS = {
    "multi_modal_data": "models take text alone so far",
    "multi_modal_uuids": "models take text alone so far",
    "mm_processor_kwargs": "models take text alone so far",
    "prompt_embeds": "a prompt is a text or token ids",
    "cache_salt": "all prompts of a program share its prefix cache",
    "encoder_prompt": "models with an encoder and a decoder are not done yet",
    "decoder_prompt": "models with an encoder and a decoder are not done yet",
}
# Arguments of vLLM's calls that ask for nothing as None.
_ARGUMENTS = {
    "lora_request": "LoRA adapters are not done yet",
    "prompt_adapter_request": "prompt adapters are not done yet",
    "mm_processor_kwargs": "models take text alone so far",
    "prompt_token_ids": "give prompts=[{'prompt_token_ids': ids}, ...]",
    "guided_options_request": "give SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "priority": "all prompts of a call have one priority",
    "tokenization_kwargs": "truncate_prompt_tokens is a parameter of its own",
    "chat_template_content_format": "a message's content is what the template asks for",
}
_NOTHING = {"chat_template_content_format": ("auto",)}
# What a chat template sees, by the API's names.
_RENDERED = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "reasoning_effort",
    "thinking",
    "think",
)


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt and, if that is known, its text. `value` is a text or token ids."""

    value: str | list[int]
    text: str | None

    @property
    def body(self) -> dict[str, Any]:
        """As in the body of a request."""
        return {"prompt": self.value}


def read_prompts(given: Any) -> list[GivenPrompt]:
    """Return the prompts one by one. Raises TypeError and ValueError."""
    if isinstance(given, str | Mapping):
        return [_prompt("prompts", given)]
    items = _items("prompts", given, f"{_PROMPT}, or a list of these")
    if items and all(_is_id(item) for item in items):
        return [_prompt("prompts", items)]
    return [_prompt(f"prompts[{place}]", item) for place, item in enumerate(items)]


def read_chats(given: Any) -> list[list[Message]]:
    """Return the messages of each chat; the values of a message are checked where it is rendered.

    Raises TypeError.
    """
    if isinstance(given, str):
        return [_chat("messages", given)]
    chats = _items("messages", given, f"{_CHAT}, or a list of such chats")
    if any(isinstance(item, Mapping) for item in chats):
        return [_chat("messages", chats)]
    return [_chat(f"messages[{place}]", item) for place, item in enumerate(chats)]


def read_texts(name: str, given: Any) -> list[str]:
    """Return the texts, one at least. Raises TypeError and ValueError."""
    wanted = "a text, or a list of texts"
    texts = [given] if isinstance(given, str) else _items(name, given, wanted)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            _wrong(f"{name}[{place}]", text, "a text")
    if not texts:
        raise ValueError(f"{name} must be {wanted}, not an empty list")
    return texts


def read_params(kind: type[P], name: str, given: Any, count: int) -> list[P | None]:
    """Return parameters of each of `count` prompts: none, the same for all, or one for each.

    Raises TypeError and ValueError.
    """
    if given is None or isinstance(given, kind):
        return [given] * count
    wanted = f"a {kind.__name__}, a list with one for each prompt, or None"
    if isinstance(given, Mapping):
        _wrong(name, given, wanted)
    params = _items(name, given, wanted)
    for place, item in enumerate(params):
        if item is not None and not isinstance(item, kind):
            _wrong(f"{name}[{place}]", item, f"a {kind.__name__} or None")
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} {name}")
    return params


def read_one(kind: type[P], name: str, given: Any) -> P:
    """Return parameters that are the same for all. Raises TypeError."""
    if not isinstance(given, kind):
        _wrong(name, given, f"a {kind.__name__}")
    return given


def check_arguments(method: str, given: Mapping[str, Any], known: Iterable[str] = ()) -> None:
    """Check arguments of vLLM's that a call here does not have; `known`: names of those that it has.

    Raises ValueError and UnknownNameError.
    """
    for name, value in given.items():
        for kind in (SamplingParams, PoolingParams):
            if name in kind.__dataclass_fields__ and name not in _ARGUMENTS:
                place = f"it is one of {kind.__name__}({name}=...)"
                raise UnknownNameError(f"LLM.{method} has no argument {name!r}: {place}")
        if name not in _ARGUMENTS:
            raise UnknownNameError(
                f"LLM.{method} has no argument {name!r}{near(name, (*known, *_ARGUMENTS))}"
            )
        if value is not None and value not in _NOTHING.get(name, ()):
            raise ValueError(f"LLM.{method} has no {name}: {_ARGUMENTS[name]}")


def chat_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a chat template other than the messages, as in the body of a request.

    Raises ValueError and UnknownNameError for what it does not: it would be ignored.
    """
    others = {name: value for name, value in given.items() if name not in _RENDERED}
    check_arguments("chat", others, _RENDERED)
    return {name: value for name, value in given.items() if name in _RENDERED}


def _prompt(name: str, given: Any) -> GivenPrompt:
    if isinstance(given, str):
        return GivenPrompt(given, given)
    if not isinstance(given, Mapping):
        return GivenPrompt(_ids(name, given, _PROMPT), None)
    parts = {key: value for key, value in given.items() if value is not None}
    text, ids = parts.pop("prompt", None), parts.pop("prompt_token_ids", None)
    for key in parts:
        reason = _PARTS.get(key, f"it must be {_PROMPT}")
        raise ValueError(f"{name} has {key!r}: {reason}")
    if text is not None and not isinstance(text, str):
        _wrong(f"{name}['prompt']", text, "a text")
    if ids is not None:
        return GivenPrompt(_ids(f"{name}['prompt_token_ids']", ids, "a list of token ids"), text)
    if text is None:
        raise ValueError(f"{name} is an object without prompt, a text, and without prompt_token_ids")
    return GivenPrompt(text, text)


def _ids(name: str, given: Any, wanted: str) -> list[int]:
    items = _items(name, given, wanted)
    for place, item in enumerate(items):
        if not _is_id(item):
            _wrong(f"{name}[{place}]", item, "a token id, which is an integer")
    return [operator.index(item) for item in items]


def _chat(name: str, given: Any) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = _items(name, given, _CHAT)
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            _wrong(f"{name}[{place}]", message, _MESSAGE)
    return messages


def _items(name: str, given: Any, wanted: str) -> list[Any]:
    """Return the items of a list, or of anything else with an order.

    A set has none, and bytes are not text.
    """
    if isinstance(given, _UNFIT) or not isinstance(given, Iterable):
        _wrong(name, given, wanted)
    try:
        return list(given)
    except TypeError:
        # An array without dimensions.
        _wrong(name, given, wanted)


def _is_id(value: Any) -> bool:
    """Return whether this is an integer, numpy's and torch's too."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except (TypeError, ValueError):
        return False
    return True


def _wrong(name: str, given: Any, wanted: str) -> NoReturn:
    shown = "None" if given is None else f"{type(given).__name__}"
    raise TypeError(f"{name} must be {wanted}, not {shown}") from None
