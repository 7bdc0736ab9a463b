"""Messages between the service and its workers: msgpack in frames (catenary/frames.py), one answer to each
task."""

from __future__ import annotations

import msgspec

from catenary.frames import HEADER_BYTES, seal
from services.tokenizer.rendering import (
    ChatOptions,
    ChatTurn,
    JsonLimits,
    ModelFiles,
    Parsers,
    PromptLimits,
    RefusalCode,
    TemplateBudget,
    TextPair,
)


class WorkerSetup(msgspec.Struct, frozen=True):
    """The first frame that a worker gets."""

    files: ModelFiles
    # Characters that a template may write at the most.
    max_rendered_chars: int
    # Token ids that one answer may hold.
    max_answer_tokens: int
    # Seconds in which a task must have ended.
    max_seconds: float
    # Address space of the process in bytes; 0: no limit.
    memory_bytes: int
    json_limits: JsonLimits
    # None: a request may bring no chat template.
    request_templates: TemplateBudget | None
    # What compiling one constraint may take, in bytes.
    constraint_memory_bytes: int
    # What a chat model is told to look for when it judges a pair.
    pair_instruction: str


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has loaded; what it found."""

    special_token_ids: list[int]
    max_token_id: int
    has_chat_template: bool
    # Variables of the chat template that a request may set.
    template_variables: list[str]
    renders_pairs: bool
    # The chat template shows tools to the model.
    reads_tools: bool
    # The parsers that its answers need, as far as its files tell.
    parsers: Parsers


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The model's files cannot be used. One line for the operator; the process ends."""

    reason: str


class ChatTask(msgspec.Struct, frozen=True, tag="chat"):
    """Render a chat to one prompt."""

    turns: list[ChatTurn]
    options: ChatOptions
    limits: PromptLimits


class CompletionTask(msgspec.Struct, frozen=True, tag="completion"):
    """Tokenize prompts, in order."""

    prompts: list[str]
    add_special_tokens: bool
    limits: PromptLimits


class PairTask(msgspec.Struct, frozen=True, tag="pairs"):
    """Render pairs of texts, in order."""

    pairs: list[TextPair]
    limits: PromptLimits


class TokenizeTask(msgspec.Struct, frozen=True, tag="tokenize"):
    """Tokenize one text, which may be empty."""

    text: str
    add_special_tokens: bool


class DetokenizeTask(msgspec.Struct, frozen=True, tag="detokenize"):
    """Ids to text."""

    token_ids: list[int]
    skip_special_tokens: bool


class ConstraintTask(msgspec.Struct, frozen=True, tag="constraint"):
    """Compile a constraint: a value of ConstraintKind, a source, and whether its objects are closed; `param`
    is the field it comes from."""

    kind: int
    source: str
    param: str
    closed: bool = False


class TokenLists(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids of each prompt. `tails`: of a chat, the last characters of its prompt.

    `second_starts`: of pairs, see RenderedPair.
    """

    prompts: list[list[int]]
    tails: list[str] = []
    second_starts: list[int] = []


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Detokenized text."""

    text: str


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """The constraint can be honoured."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The input was at fault; see RenderRefused."""

    code: RefusalCode
    message: str
    param: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The task met a defect of the service. `kind` is the exception's type, for the log."""

    kind: str


_ENCODER = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytearray:
    """Return the frame of a message."""
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    return seal(frame)


Task = ChatTask | CompletionTask | PairTask | TokenizeTask | DetokenizeTask | ConstraintTask
Answer = TokenLists | Text | Compiled | Refused | Broken
Greeting = WorkerReady | WorkerFailed
