"""Why a sequence is not taken, and defects."""

from __future__ import annotations

from services.engine.link import CoreErrorCode


class QueueFull(Exception):
    """As many sequences live as the scheduler may hold. `limit` names the option that sets the bound."""

    def __init__(self, limit: str, value: int) -> None:
        super().__init__(f"the engine's queue is full ({limit}={value})")
        self.limit = limit
        self.value = value


class SequenceRefused(Exception):
    """A sequence that can never run here. The text is for the caller, `param` the parameter it is about."""

    def __init__(self, code: CoreErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class SchedulerError(Exception):
    """A defect: the scheduler was driven wrongly, or its books do not add up."""
