"""Learns buckets from lengths, and judges plans by simulated traffic. Needs numpy, and drives the scheduler.

`services.engine.bucketing` does not import it: an engine only reads the file that learning writes.
"""

from __future__ import annotations

from services.engine.learning.learn import Budget, learn_buckets
from services.engine.learning.lengths import (
    SequenceLengths,
    StepTiming,
    chat_lengths,
    read_recording,
)
from services.engine.learning.phases import Partition, Staircase
from services.engine.learning.steptime import ModelCost, StepTimes, estimated_times, fitted_times
from services.engine.learning.traffic import Assessment, ExactShapes, Workload, assess, learn_for

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
