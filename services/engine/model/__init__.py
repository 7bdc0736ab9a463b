"""Models on disk: resolving, converting and checking them. Imports no torch.

Backends, which do, are packages of their own below this one.
"""

from __future__ import annotations

from services.engine.model.checks import check_directory, read_config
from services.engine.model.errors import ModelError
from services.engine.model.facts import DirectoryFacts, read_facts

__all__ = ["DirectoryFacts", "ModelError", "check_directory", "read_config", "read_facts"]
