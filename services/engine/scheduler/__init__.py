"""Which tokens of which sequences each engine step computes. Pure: no device, no clock, no I/O."""

from __future__ import annotations

from services.engine.scheduler.planner import SchedulerConfig
from services.engine.scheduler.reuse import IncomingPrefix, TransferBlocks, prompt_name
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.sequence import (
    Advanced,
    BeamGroup,
    DecodeRow,
    Finished,
    IllegalTransition,
    Outcome,
    PrefillChunk,
    QueueFull,
    SchedulerError,
    SchedulerLoad,
    Scored,
    Sequence,
    SequenceParams,
    SequenceRefused,
    SequenceStatus,
    StepPlan,
    sequence_from,
)

__all__ = [
    "Advanced",
    "BeamGroup",
    "DecodeRow",
    "Finished",
    "IllegalTransition",
    "IncomingPrefix",
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
    "TransferBlocks",
    "prompt_name",
    "sequence_from",
]
