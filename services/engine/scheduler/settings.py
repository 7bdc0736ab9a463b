"""Limits of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits; every one names the engine option that sets it.

    `max_num_seqs` sequences run at once and `max_waiting` more may wait. A step computes up to
    `max_num_batched_tokens` tokens, or `max_idle_batched_tokens` if nothing decodes in it (None: no more then
    either), of up to `max_prefill_seqs` sequences in its prefill forward. A sequence holds up to
    `max_model_len` tokens, prompt and completion together.

    `contiguous`: decode fetches the pool's blocks as one slice up to the batch's highest id. What runs is
    kept near the start of the pool by up to `max_block_moves` moves in a step.

    A lower priority is more urgent, and one level of it weighs as much as `priority_ageing_steps` steps of
    waiting. All that wait age alike, so the key by which they are compared never changes: priority times
    ageing steps, plus the step at which the waiting began. The `order` of sequences counts from their
    arrival: it decides who runs next and, from the other end, who gives way when blocks run out. The first
    in that order therefore always goes on, later arrivals cannot stay before it, and nobody starves. The
    `turn` of a started prompt counts from its last chunk: it decides who computes the next one.
    """

    max_model_len: int
    max_num_seqs: int = 32
    max_waiting: int = 256
    max_num_batched_tokens: int = 512
    max_prefill_seqs: int = 1
    priority_ageing_steps: int = 256
    contiguous: bool = False
    max_block_moves: int = 32
    max_idle_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_seqs",
            "priority_ageing_steps",
            "max_block_moves",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, not {self.max_waiting}")
        if self.prompt_budget(0) < self.max_num_batched_tokens:
            raise ValueError(
                f"max_idle_batched_tokens ({self.max_idle_batched_tokens}) must be at least "
                f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in a step"
            )

    def prompt_budget(self, decoding: int) -> int:
        """Tokens of prompts in a step in which so many sequences decode."""
        if decoding or self.max_idle_batched_tokens is None:
            return self.max_num_batched_tokens - decoding
        return self.max_idle_batched_tokens
