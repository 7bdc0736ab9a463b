"""How many tokens and prompts one step of an engine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.engine.model.paged import PagedModel
from services.engine.options import EngineOptions

# Where padding costs nothing: a prompt that comes alone is computed in fewer pieces, and of short prompts as
# many together as the tokens allow.
_IDLE: Final = 2
_PROMPTS: Final = 16
# Where a forward computes its padding, and its shapes are many.
_PADDED_PROMPTS: Final = 4


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of steps.

    tokens: of a step, prompts and decodes together; idle_tokens: of prompts in a step in which nothing
    decodes; prompts: computed together; padded_tokens: of a prefill forward, padding included.
    """

    tokens: int
    idle_tokens: int
    prompts: int
    padded_tokens: int


def step_limits(options: EngineOptions, model: PagedModel) -> StepLimits:
    """What the options say, or what is best for the way in which the model is computed."""
    tokens, free = options.max_num_batched_tokens, model.skips_padding
    # Listed buckets are for the tokens of a step.
    listed = options.bucketing_file is not None
    idle = options.max_idle_batched_tokens or (_IDLE * tokens if free and not listed else tokens)
    prompts = options.max_prefill_batch or (_PROMPTS if free else _PADDED_PROMPTS)
    return StepLimits(tokens, idle, prompts, padded_tokens=2 * idle if free and not listed else idle)
