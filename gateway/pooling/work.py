"""The work of a request for vectors or scores, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catenary.v1 import common_pb2, tokenizer_pb2
from gateway.errors import bad_request
from gateway.text.models import Model

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Work:
    """Documents as texts or ids, pairs, or a chat: exactly one of the four has any.

    Args:
        task: EMBED, CLASSIFY, or SCORE (of pairs, as a rule).
        param: the field that the documents come from, for errors.
        chat: one document, by the model's chat template.
        compared: places in `texts` of the first and the second text of each comparison.
        dimensions: None: whole vectors.
        truncate: tokens to keep of a longer document; None: it is refused.
        add_special_tokens: of texts.
        raw: leave out the model's last step, see Pooling.raw in protos/catenary/v1/common.proto.
    """

    task: common_pb2.ModelTask.ValueType
    param: str
    texts: Sequence[str] = ()
    ids: Sequence[Sequence[int]] = ()
    pairs: Sequence[Pair] = ()
    chat: tokenizer_pb2.ChatInput | None = None
    compared: Sequence[tuple[int, int]] = ()
    dimensions: int | None = None
    truncate: int | None = None
    add_special_tokens: bool = True
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids; `second_start`: where the second text of a pair begins, 0 for one text."""

    token_ids: Sequence[int]
    second_start: int = 0


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vectors of a request's documents, little-endian float32, in order.

    A score has one number, classes have one for each.
    """

    request_id: str
    created: int
    model: Model
    work: Work
    documents: Sequence[Document]
    vectors: Sequence[bytes]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(document.token_ids) for document in self.documents)


def vector_width(wanted: int | None, model: Model) -> int | None:
    """The width of vectors to ask an engine for; None: the model's own. Raises ApiError 400."""
    info = model.info
    if wanted is not None and common_pb2.MODEL_TASK_EMBED not in model.tasks:
        raise bad_request("Only vectors have 'dimensions'; scores and classes have none.", "dimensions")
    if wanted is None or wanted == info.embedding_width:
        return None
    if wanted in info.embedding_dimensions or (info.any_dimensions and wanted < info.embedding_width):
        return wanted
    if info.any_dimensions:
        allowed = f"1 to {info.embedding_width}"
    else:
        allowed = ", ".join(map(str, (*info.embedding_dimensions, info.embedding_width)))
    raise bad_request(f"Invalid 'dimensions': this model's vectors can have {allowed} numbers.", "dimensions")
