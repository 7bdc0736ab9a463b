"""The requests of the API: strict models of what is supported, and a list of what is known and is not."""

from __future__ import annotations

from gateway.schemas.base import RequestModel
from gateway.schemas.batches import MAX_EXPIRY_S, MIN_EXPIRY_S, BatchRequest
from gateway.schemas.calls import CallMode
from gateway.schemas.chat import ChatRequest
from gateway.schemas.chat_input import ChatInputFields, TokenizeChatRequest
from gateway.schemas.chat_pooling import (
    ChatClassifyRequest,
    ChatDocument,
    ChatEmbeddingRequest,
    ChatPoolingRequest,
)
from gateway.schemas.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from gateway.schemas.generation import GenerationFields
from gateway.schemas.limits import RequestLimits
from gateway.schemas.messages import ChatMessage, ToolCall
from gateway.schemas.pooling import (
    SCORE_SIDES,
    ClassifyRequest,
    EmbeddingFields,
    EmbeddingRequest,
    PooledFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TextFields,
)
from gateway.schemas.responses import (
    BY_CHAT_NAME,
    CHAT_PARAMETERS,
    INCLUDABLE,
    OTHER_TOOLS,
    OUTPUT_LOGPROBS,
    ReasoningOptions,
    ResponseChat,
    ResponsesRequest,
    ResponseTool,
)
from gateway.schemas.structured import ResponseFormat, StructuredFields, StructuredOutputs, TagStructure
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.schemas.tools import FunctionTool
from gateway.schemas.unsupported import unsupported_parameter
from gateway.schemas.validation import parse_request

__all__ = [
    "BY_CHAT_NAME",
    "CHAT_PARAMETERS",
    "DEFAULT_MAX_TOKENS",
    "INCLUDABLE",
    "MAX_EXPIRY_S",
    "MIN_EXPIRY_S",
    "OTHER_TOOLS",
    "OUTPUT_LOGPROBS",
    "SCORE_SIDES",
    "BatchRequest",
    "CallMode",
    "ChatClassifyRequest",
    "ChatDocument",
    "ChatEmbeddingRequest",
    "ChatInputFields",
    "ChatMessage",
    "ChatPoolingRequest",
    "ChatRequest",
    "ClassifyRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingFields",
    "EmbeddingRequest",
    "FunctionTool",
    "GenerationFields",
    "PooledFields",
    "PoolingFields",
    "PoolingRequest",
    "ReasoningOptions",
    "RequestLimits",
    "RequestModel",
    "RerankRequest",
    "ResponseChat",
    "ResponseFormat",
    "ResponseTool",
    "ResponsesRequest",
    "ScoreRequest",
    "StructuredFields",
    "StructuredOutputs",
    "TagStructure",
    "TextFields",
    "TokenizeChatRequest",
    "TokenizeRequest",
    "ToolCall",
    "parse_request",
    "unsupported_parameter",
]
