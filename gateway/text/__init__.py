"""The models' tokenizers as the gateway uses them: files to decode with, and the services that render."""

from __future__ import annotations

from gateway.text.models import Model, ModelBoard, task_names, tasks_of
from gateway.text.pool import TokenizerPool
from gateway.text.rendered import Rendered
from gateway.text.target import TokenizerTarget

__all__ = [
    "Model",
    "ModelBoard",
    "Rendered",
    "TokenizerPool",
    "TokenizerTarget",
    "task_names",
    "tasks_of",
]
