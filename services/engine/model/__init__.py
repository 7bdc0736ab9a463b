"""Models on disk: resolving, converting and checking them. Imports no torch.

Backends, which do, are packages of their own below this one.
"""

from __future__ import annotations

from services.engine.model.checks import check_directory, read_config, read_json
from services.engine.model.configs import find_config
from services.engine.model.errors import ModelError, UnknownModelError
from services.engine.model.facts import DirectoryFacts, longest_context, read_facts
from services.engine.model.fingerprint import weights_fingerprint
from services.engine.model.preparation import default_cache_dir, prepare_model
from services.engine.model.sources import SourceKind, resolve_source
from services.engine.model.tasks import Task, class_labels, find_task

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
