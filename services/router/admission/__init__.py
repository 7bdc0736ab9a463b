"""Admission: checks, load accounts, queues, fairness and refusals of sequences. Pure."""

from __future__ import annotations

from services.router.admission.guard import Admission, AdmissionLimits, Ledger, LoadGuard
from services.router.admission.lanes import CLASSES, LANE_NAMES, QueuedSequence, lane_of
from services.router.admission.queues import (
    AdmissionQueues,
    LaneView,
    ModelQueue,
    QueueOptions,
    RefusedFor,
    Shedding,
)
from services.router.admission.validation import (
    Refused,
    SpecLimits,
    not_served,
    sequences_of,
    too_long,
    validate,
    validate_task,
)

__all__ = [
    "CLASSES",
    "LANE_NAMES",
    "Admission",
    "AdmissionLimits",
    "AdmissionQueues",
    "LaneView",
    "Ledger",
    "LoadGuard",
    "ModelQueue",
    "QueueOptions",
    "QueuedSequence",
    "Refused",
    "RefusedFor",
    "Shedding",
    "SpecLimits",
    "lane_of",
    "not_served",
    "sequences_of",
    "too_long",
    "validate",
    "validate_task",
]
