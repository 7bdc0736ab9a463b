"""How a core ends when it cannot go on."""

from __future__ import annotations


class StartError(Exception):
    """The core cannot start with these options on this machine: the operator's to mend. One readable line."""


class CoreFailure(Exception):
    """The core cannot go on. One readable line."""
