"""Answers of `/v1/completions`: the chunks of a stream and the whole object."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.streaming.delta import (
    ChoiceDelta,
    ChoiceResult,
    CompletionLogprobs,
    PromptLogprob,
    PromptReport,
    completion_logprobs,
    prompt_logprobs,
)
from gateway.streaming.writer import Usage, Writer, listed

_PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


class CompletionWriter(Writer[CompletionChoice]):
    """Completions: a chunk is an object like the whole answer; each choice tells of its own prompt."""

    odd_prefix = "bytes:"

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        choices = [
            self._with_prompt(
                CompletionChoice(
                    result.index,
                    result.text,
                    None if result.entries is None else completion_logprobs(result.entries, self._names),
                    result.finish_reason,
                    result.stop_reason,
                    listed(result.token_ids),
                ),
                result.prompt,
            )
            for result in results
        ]
        return msgspec.json.encode(self._object(choices, usage, None))

    def _text(self, delta: ChoiceDelta) -> CompletionChoice:
        choice = CompletionChoice(delta.index, delta.text)
        if delta.entries:
            choice.logprobs = completion_logprobs(delta.entries, self._names)
        if delta.token_ids:
            choice.token_ids = list(delta.token_ids)
        return self._with_prompt(choice, delta.prompt)

    def _end(self, delta: ChoiceDelta) -> CompletionChoice:
        return CompletionChoice(delta.index, "", None, delta.finish_reason, delta.stop_reason)

    def _with_prompt(self, choice: CompletionChoice, prompt: PromptReport | None) -> CompletionChoice:
        if prompt is not None:
            choice.prompt_token_ids = listed(prompt.token_ids)
            logprobs = prompt_logprobs(prompt, self._names)
            choice.prompt_logprobs = UNSET if logprobs is None else logprobs
        return choice

    def _object(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, prompt: PromptReport | None
    ) -> Completion:
        return Completion(
            self._id, "text_completion", self._created, self._model, choices, usage, self._service_tier
        )
