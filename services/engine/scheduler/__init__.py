"""Which tokens of which sequences each engine step computes. Pure: no device, no clock, no I/O."""

from __future__ import annotations

from services.engine.scheduler.beams import BeamGroup
from services.engine.scheduler.errors import QueueFull, SchedulerError, SequenceRefused
from services.engine.scheduler.kept import Expected, KeptBlocks
from services.engine.scheduler.load import SchedulerLoad
from services.engine.scheduler.plan import (
    Advanced,
    DecodeRow,
    Finished,
    Outcome,
    PrefillChunk,
    Scored,
    StepPlan,
)
from services.engine.scheduler.prefixes import prompt_name
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.sequence import (
    IllegalTransition,
    Sequence,
    SequenceParams,
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
