"""How an offline batch is sampled: vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of a prompt. They are checked when it is submitted, as those of a request over HTTP are: see
    docs/api.md for their meaning and limits. None takes the default of the model or of the API.

    `logprobs` is the number of alternatives to report for each token, `prompt_logprobs` the same for tokens
    of the prompt. `structured_outputs` is an object with one of json, regex, choice, grammar, json_object.
    """

    n: int = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    seed: int | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = 16
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """The parameters that are set, as in the body of a request."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        for name in ("allowed_token_ids", "bad_words", "stop_token_ids"):
            if name in given:
                given[name] = list(given[name])
        if self.stop is not None and not isinstance(self.stop, str):
            given["stop"] = list(self.stop)
        return given
