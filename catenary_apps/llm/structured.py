"""What an answer must look like, by vLLM's names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from catenary_apps.llm.endpoint import LIMITS, OfflineEndpoint
from catenary_apps.llm.names import names_what_is_near
from gateway import ApiError

_BACKENDS = (None, "auto", "guidance", "llguidance")


@names_what_is_near
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What an answer must look like: exactly one kind. See docs/api.md for their meaning and limits.

    Args:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a grammar in Lark's or GBNF's notation.
        json_object: True: the answer is a JSON object.
        structural_tag: tags whose inside is JSON, as an object or as text.
        disable_any_whitespace: False: it cannot be had.
        disable_additional_properties: False: it cannot be had.
        whitespace_pattern: None: it cannot be had.

    Raises ValueError at once for what no model can honour, and TypeError for a name that is not known.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    _KINDS: ClassVar = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.disable_any_whitespace:
            raise ValueError(f"{name}: disable_any_whitespace is not done; a regex or grammar can say it")
        if self.disable_additional_properties:
            reason = "an object that lists its properties has no others; else write additionalProperties"
            raise ValueError(f"{name}: disable_additional_properties is not done: {reason}")
        if self.whitespace_pattern is not None:
            raise ValueError(f"{name}: whitespace_pattern is not done; a regex or grammar can say it")
        given = [kind for kind in self._KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"{name} takes one of {', '.join(self._KINDS)}, and there is {found}")
        try:
            asked = {"model": "any", "prompt": [0], "structured_outputs": self.body()}
            OfflineEndpoint().parse(asked, LIMITS)
        except ApiError as error:
            raise ValueError(error.message.replace("structured_outputs.", "")) from None

    def body(self) -> dict[str, Any]:
        """The kind as in the body of a request."""
        found = {}
        for kind in self._KINDS:
            value = getattr(self, kind)
            if isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = list(value)
            if value not in (None, False):
                found[kind] = value
        return found


@names_what_is_near
@dataclass(frozen=True, slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """`StructuredOutputsParams` by its older name, for `SamplingParams(guided_decoding=...)`.

    `backend`: there is one, which the engine chooses; another one's name gives a warning.
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that was written.
        StructuredOutputsParams.__post_init__(self)
        if self.backend not in _BACKENDS:
            line = "backend has no effect: llguidance does it, or xgrammar with grammar_backend of the LLM"
            warnings.warn(line, stacklevel=4)
