"""Worker processes: rendering off the event loop, under a time limit."""

from __future__ import annotations

from services.tokenizer.workers.messages import (
    Answer,
    Broken,
    ChatTask,
    CompletionTask,
    ConstraintTask,
    DetokenizeTask,
    PairTask,
    Refused,
    Task,
    Text,
    TokenizeTask,
    TokenLists,
    WorkerReady,
    WorkerSetup,
)
from services.tokenizer.workers.pool import PoolFull, PoolLimits, TaskCrashed, TaskTimeout, WorkerPool
from services.tokenizer.workers.tools import TaskTools, answer_of

__all__ = [
    "Answer",
    "Broken",
    "ChatTask",
    "CompletionTask",
    "ConstraintTask",
    "DetokenizeTask",
    "PairTask",
    "PoolFull",
    "PoolLimits",
    "Refused",
    "Task",
    "TaskCrashed",
    "TaskTimeout",
    "TaskTools",
    "Text",
    "TokenLists",
    "TokenizeTask",
    "WorkerPool",
    "WorkerReady",
    "WorkerSetup",
    "answer_of",
]
