"""One request's sequences: from a checked request to the deltas of its choices."""

from __future__ import annotations

from gateway.generation.answer import collect
from gateway.generation.chat_input import to_chat_input
from gateway.generation.endpoint import Endpoint
from gateway.generation.fitting import fitted
from gateway.generation.generation import Generation
from gateway.generation.parsing import choose_constraint, choose_parser
from gateway.generation.planning import truncation
from gateway.generation.priorities import Standing
from gateway.generation.prompt_answers import RenderedRequest, Tokens, TokensText
from gateway.generation.prompts import PromptHandler, PromptService
from gateway.generation.service import GenerationService, Running

__all__ = [
    "Endpoint",
    "Generation",
    "GenerationService",
    "PromptHandler",
    "PromptService",
    "RenderedRequest",
    "Running",
    "Standing",
    "Tokens",
    "TokensText",
    "choose_constraint",
    "choose_parser",
    "collect",
    "fitted",
    "to_chat_input",
    "truncation",
]
