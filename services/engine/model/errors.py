"""The one failure that loading a model may end with."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served. The text is one line for the operator: what is wrong, and where."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnknownModelError(ModelError):
    """The model option names nothing: not the model is wrong, but the command line."""
