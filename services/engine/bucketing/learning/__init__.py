"""Learns buckets from lengths, and judges plans by simulated traffic. Needs numpy, and drives the scheduler.

`services.engine.bucketing` does not import it: an engine only reads the file that learning writes.
"""

from __future__ import annotations

from services.engine.bucketing.learning.assess import Assessment, Workload, assess, learn_for
from services.engine.bucketing.learning.learn import Budget, learn_buckets
from services.engine.bucketing.learning.lengths import (
    SequenceLengths,
    StepTiming,
    chat_lengths,
    read_recording,
)
from services.engine.bucketing.learning.staircase import Partition, Staircase
from services.engine.bucketing.learning.steptime import ModelCost, StepTimes, estimated_times, fitted_times
from services.engine.bucketing.learning.traffic import ExactShapes

__all__ = [
    "Assessment",
    "Budget",
    "ExactShapes",
    "ModelCost",
    "Partition",
    "SequenceLengths",
    "Staircase",
    "StepTimes",
    "StepTiming",
    "Workload",
    "assess",
    "chat_lengths",
    "estimated_times",
    "fitted_times",
    "learn_buckets",
    "learn_for",
    "read_recording",
]
