"""Chat templates and tokenization as pure functions of a model's files."""

from __future__ import annotations

from services.tokenizer.rendering.detection import Parsers
from services.tokenizer.rendering.files import (
    ModelFiles,
    ModelFilesError,
    RefusalCode,
    RenderRefused,
    read_model_files,
)
from services.tokenizer.rendering.inputs import ChatOptions, ChatTurn, JsonLimits, PromptLimits, TurnCall
from services.tokenizer.rendering.renderer import DEFAULT_INSTRUCTION, PairRenderer, Renderer, TextPair
from services.tokenizer.rendering.template import TemplateBudget

__all__ = [
    "DEFAULT_INSTRUCTION",
    "ChatOptions",
    "ChatTurn",
    "JsonLimits",
    "ModelFiles",
    "ModelFilesError",
    "PairRenderer",
    "Parsers",
    "PromptLimits",
    "RefusalCode",
    "RenderRefused",
    "Renderer",
    "TemplateBudget",
    "TextPair",
    "TurnCall",
    "read_model_files",
]
