"""Chat templates and tokenization as pure functions of a model's files."""

from __future__ import annotations

from services.tokenizer.rendering.budget import TemplateBudget
from services.tokenizer.rendering.detection import Parsers
from services.tokenizer.rendering.errors import ModelFilesError, RefusalCode, RenderRefused
from services.tokenizer.rendering.files import ModelFiles, read_model_files
from services.tokenizer.rendering.pairs import DEFAULT_INSTRUCTION, PairRenderer, TextPair
from services.tokenizer.rendering.renderer import Renderer
from services.tokenizer.rendering.turns import ChatOptions, ChatTurn, PromptLimits, TurnCall
from services.tokenizer.rendering.values import JsonLimits

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
