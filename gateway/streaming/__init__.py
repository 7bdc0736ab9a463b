"""From tokens to the bytes of an answer: stop strings, log probabilities, chunks, whole objects."""

from __future__ import annotations

from gateway.streaming.chat import ChatChunk, ChatCompletion, ChatWriter
from gateway.streaming.completion import Completion, CompletionWriter
from gateway.streaming.delta import ChoiceDelta, ChoiceResult, PromptReport, joined
from gateway.streaming.echo import Echo
from gateway.streaming.entries import LogprobEntry, TokenLogprob
from gateway.streaming.logprobs import ChatLogprob, TokenNames, chat_logprobs
from gateway.streaming.sequence_text import Piece, SequenceText, TextOptions
from gateway.streaming.sse import SSE_DONE, SSE_HEADERS, sse_error_event, sse_event
from gateway.streaming.usage import Usage, usage_of
from gateway.streaming.writer import AnswerHead, AnyWriter

__all__ = [
    "SSE_DONE",
    "SSE_HEADERS",
    "AnswerHead",
    "AnyWriter",
    "ChatChunk",
    "ChatCompletion",
    "ChatLogprob",
    "ChatWriter",
    "ChoiceDelta",
    "ChoiceResult",
    "Completion",
    "CompletionWriter",
    "Echo",
    "LogprobEntry",
    "Piece",
    "PromptReport",
    "SequenceText",
    "TextOptions",
    "TokenLogprob",
    "TokenNames",
    "Usage",
    "chat_logprobs",
    "joined",
    "sse_error_event",
    "sse_event",
    "usage_of",
]
