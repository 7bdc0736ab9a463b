"""Sequences for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from catenary.v1 import common_pb2
from catenary_testing.engine import Script, continuation

_numbers = itertools.count(1)


def sequence_spec(
    token_ids: Sequence[int],
    *,
    model: str = "scripted",
    prompt_len: int | None = None,
    seed: int = 7,
    max_tokens: int | None = 8,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_tokens: int | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool | None = None,
    top_logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    priority: int | None = None,
    cache_salt: str | None = None,
    traceparent: str | None = None,
    **sampling: Any,
) -> common_pb2.SequenceSpec:
    """A spec with the given fields present and the others absent; `sampling`: more SamplingParams."""
    return common_pb2.SequenceSpec(
        request_id=f"test-{next(_numbers)}",
        model=model,
        token_ids=token_ids,
        prompt_len=prompt_len,
        sampling=common_pb2.SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, **sampling
        ),
        stopping=common_pb2.StoppingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        response=common_pb2.ResponseOptions(top_logprobs=top_logprobs, prompt_logprobs=prompt_logprobs),
        priority=priority,
        cache_salt=cache_salt,
        traceparent=traceparent,
    )


def expected_tokens(
    token_ids: Sequence[int], count: int, *, seed: int = 7, script: Script | None = None
) -> list[int]:
    """What a scripted engine without rules answers."""
    model = (script or Script()).model
    avoid = {*model.eos_token_ids, *model.avoid}
    return continuation(token_ids, count, seed=seed, vocab_size=model.vocab_size, avoid=avoid)
