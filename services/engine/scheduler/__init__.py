"""Which tokens of which sequences each engine step computes. Pure: no device, no clock, no I/O."""

from __future__ import annotations

from services.engine.scheduler.plan import (
    Advanced,
    DecodeRow,
    Finished,
    Outcome,
    PrefillChunk,
    SchedulerLoad,
    Scored,
    StepPlan,
)
from services.engine.scheduler.reuse import Expected, KeptBlocks, prompt_name
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.sequence import (
    BeamGroup,
    IllegalTransition,
    QueueFull,
    SchedulerError,
    Sequence,
    SequenceParams,
    SequenceRefused,
    SequenceStatus,
    sequence_from,
)
from services.engine.scheduler.settings import SchedulerConfig

__all__ = [
    "Advanced",
    "BeamGroup",
    "DecodeRow",
    "Expected",
    "Finished",
    "IllegalTransition",
    "KeptBlocks",
    "Outcome",
    "PrefillChunk",
    "QueueFull",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerLoad",
    "Scored",
    "Sequence",
    "SequenceParams",
    "SequenceRefused",
    "SequenceStatus",
    "StepPlan",
    "prompt_name",
    "sequence_from",
]
