"""From a gateway's choices to the outputs of an offline batch."""

from __future__ import annotations

from collections.abc import Sequence

from catenary.text import Vocabulary
from catenary_apps.llm.endpoint import OfflineRequest
from catenary_apps.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from gateway.generation.generation import Generation
from gateway.streaming.delta import ChoiceResult
from gateway.streaming.entries import TokenLogprob


def request_output(
    generation: Generation, results: Sequence[ChoiceResult], prompt: str | None
) -> RequestOutput:
    """The output of a generation with one prompt, whose text it was, and its finished choices."""
    plan = generation.plan
    fields = plan.fields
    decodes = not (isinstance(fields, OfflineRequest) and fields.detokenize is False)
    vocabulary = plan.model.vocabulary if decodes else None
    details = generation.usage().prompt_tokens_details
    report = results[0].prompt
    scores = report.logprobs if report is not None else None
    return RequestOutput(
        request_id=plan.request_id,
        prompt=prompt,
        prompt_token_ids=list(plan.prompts[0]),
        prompt_logprobs=(
            None
            if scores is None
            else [None if value is None else _logprobs(token, value, vocabulary) for token, value in scores]
        ),
        outputs=[_completion(result, vocabulary) for result in results],
        num_cached_tokens=None if details is None else details.cached_tokens,
    )


def beam_output(found: RequestOutput, vocabulary: Vocabulary) -> BeamSearchOutput:
    """The beams of a prompt, each with the prompt in front, as vLLM's."""
    prompt = found.prompt_token_ids
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=prompt + one.token_ids,
                logprobs=one.logprobs or [],
                cum_logprob=one.cumulative_logprob or 0.0,
                text=vocabulary.decode(prompt) + one.text,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
            for one in found.outputs
        ]
    )


def _completion(result: ChoiceResult, vocabulary: Vocabulary | None) -> CompletionOutput:
    scored = None
    if result.entries is not None:
        scored = [(entry.token_id, entry.logprob) for entry in result.entries if entry.logprob is not None]
    return CompletionOutput(
        index=result.index,
        text="" if vocabulary is None else result.text,
        token_ids=list(result.token_ids or ()),
        cumulative_logprob=None if scored is None else sum(value.sampled for _, value in scored),
        logprobs=None if scored is None else [_logprobs(token, value, vocabulary) for token, value in scored],
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
    )


def _logprobs(token: int, value: TokenLogprob, vocabulary: Vocabulary | None) -> dict[int, Logprob]:
    found = {
        other: Logprob(logprob, rank, _text(other, vocabulary))
        for rank, (other, logprob) in enumerate(zip(value.top_ids, value.top_values, strict=True), start=1)
    }
    found.setdefault(token, Logprob(value.sampled, None, _text(token, vocabulary)))
    return found


def _text(token: int, vocabulary: Vocabulary | None) -> str | None:
    return None if vocabulary is None else vocabulary.token_bytes(token).decode("utf-8", "replace")
