"""What rendering refuses, and why."""

from __future__ import annotations

from enum import StrEnum


class RefusalCode(StrEnum):
    """The error codes of the contract that rendering can give, by their name there without the prefix."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNSUPPORTED = "UNSUPPORTED"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"


class RenderRefused(Exception):
    """The input cannot be rendered. `message` is for the caller; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str, code: RefusalCode = RefusalCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelFilesError(Exception):
    """A model directory cannot be served. The text is one line for the operator; it may name paths."""
