"""Models on disk: resolving, converting and checking them. Imports no torch.

Backends, which do, are packages of their own below this one.
"""

from __future__ import annotations

from services.engine.model.checks import (
    ModelError,
    UnknownModelError,
    check_directory,
    read_config,
    read_json,
)
from services.engine.model.facts import (
    DirectoryFacts,
    Task,
    class_labels,
    find_task,
    longest_context,
    read_facts,
    weights_fingerprint,
)
from services.engine.model.preparation import default_cache_dir, find_config, prepare_model
from services.engine.model.sources import SourceKind, resolve_source

__all__ = [
    "DirectoryFacts",
    "ModelError",
    "SourceKind",
    "Task",
    "UnknownModelError",
    "check_directory",
    "class_labels",
    "default_cache_dir",
    "find_config",
    "find_task",
    "longest_context",
    "prepare_model",
    "read_config",
    "read_facts",
    "read_json",
    "resolve_source",
    "weights_fingerprint",
]
