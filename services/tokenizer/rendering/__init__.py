"""Chat templates and tokenization as pure functions of a model's files."""

from __future__ import annotations

from services.tokenizer.rendering.errors import ModelFilesError, RefusalCode, RenderRefused
from services.tokenizer.rendering.files import ModelFiles, read_model_files
from services.tokenizer.rendering.renderer import Renderer
from services.tokenizer.rendering.template import ChatTurn

__all__ = [
    "ChatTurn",
    "ModelFiles",
    "ModelFilesError",
    "RefusalCode",
    "RenderRefused",
    "Renderer",
    "read_model_files",
]
