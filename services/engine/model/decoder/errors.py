"""Why our decoder does not serve a checkpoint that transformers may."""

from __future__ import annotations

from services.engine.model.errors import ModelError


class UnsupportedByDecoder(ModelError):
    """The config asks for something that the decoder does not compute."""

    def __init__(self, model_type: str, what: str) -> None:
        self.what = what
        super().__init__(
            f"our decoder does not know {what} (model type {model_type}): "
            "set model-backend to transformers, or to auto"
        )
