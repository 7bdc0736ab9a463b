"""Work of a request for vectors or scores: its documents and pairs, rendered, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from catenary.v1 import common_pb2, tokenizer_pb2
from gateway.errors import ApiError, bad_request
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool
from gateway.text.target import Rendered

T = TypeVar("T")


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
    """Vectors of a request's documents, little-endian float32, in order.

    A score has one number, classes have one for each."""

    request_id: str
    created: int
    model: Model
    work: Work
    documents: Sequence[Document]
    vectors: Sequence[bytes]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(document.token_ids) for document in self.documents)


def vector_width(wanted: int | None, model: Model) -> int | None:
    """Return the width of vectors to ask an engine for; None: the model's own. Raises ApiError 400."""
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


# Texts of one call of a tokenizer service: time and message size are limited for each call. A query goes with
# each of its documents, so the pairs of a request may be far longer than the request.
_CHUNK = 64
_CHUNK_CHARS = 1 << 20
_ADVICE = "Please shorten it, or set 'truncate_prompt_tokens' to have it cut."


async def render(
    work: Work, model: Model, pool: TokenizerPool, request_id: str, tenant: str
) -> list[Document]:
    """Return the documents, all of them checked. Raises ApiError."""
    keep = _kept(work, model)
    if work.ids:
        found = [Document(ids) for ids in work.ids]
    elif work.pairs:
        found = await _pairs(work, model, pool, request_id, tenant, keep)
    elif work.chat is not None:
        found = await _chat(work, model, pool, request_id, tenant, keep)
    else:
        found = await _texts(work, model, pool, request_id, tenant, keep)
    if keep is not None and not work.pairs:
        found = [Document(cut(document.token_ids, keep, model)) for document in found]
    for document in found:
        _check(document, model, work.param)
    return found


def cut(ids: Sequence[int], keep: int, model: Model) -> Sequence[int]:
    """Keep the first of the ids, and the control tokens at the end, `keep` in all."""
    if len(ids) <= keep:
        return ids
    tail = 0
    while tail < keep and model.vocabulary.is_special(ids[-1 - tail]):
        tail += 1
    return [*ids[: keep - tail], *ids[len(ids) - tail :]]


async def _texts(
    work: Work, model: Model, pool: TokenizerPool, request_id: str, tenant: str, keep: int | None
) -> list[Document]:
    found: list[Document] = []
    for texts in _chunks(work.texts, len):
        request = tokenizer_pb2.RenderRequest(
            request_id=request_id,
            tenant=tenant,
            model=model.name,
            completion=tokenizer_pb2.CompletionInput(
                prompts=texts, add_special_tokens=work.add_special_tokens
            ),
            max_prompt_tokens=model.max_model_len if keep is None else None,
            first_tokens=keep,
        )
        rendered = await _call(pool, request, work)
        found += [Document(ids) for ids in rendered.prompts]
    return found


async def _chat(
    work: Work, model: Model, pool: TokenizerPool, request_id: str, tenant: str, keep: int | None
) -> list[Document]:
    request = tokenizer_pb2.RenderRequest(
        request_id=request_id,
        tenant=tenant,
        model=model.name,
        chat=work.chat,
        max_prompt_tokens=model.max_model_len if keep is None else None,
        first_tokens=keep,
    )
    rendered = await _call(pool, request, work)
    return [Document(ids) for ids in rendered.prompts]


async def _pairs(
    work: Work, model: Model, pool: TokenizerPool, request_id: str, tenant: str, keep: int | None
) -> list[Document]:
    found: list[Document] = []
    for pairs in _chunks(work.pairs, lambda pair: len(pair[0]) + len(pair[1])):
        request = tokenizer_pb2.RenderRequest(
            request_id=request_id,
            tenant=tenant,
            model=model.name,
            pairs=tokenizer_pb2.PairInput(
                pairs=[tokenizer_pb2.TextPair(first=first, second=second) for first, second in pairs]
            ),
            max_prompt_tokens=model.max_model_len,
            truncate_to=keep,
        )
        rendered = await _call(pool, request, work)
        starts = rendered.second_starts
        found += [Document(ids, start) for ids, start in zip(rendered.prompts, starts, strict=True)]
    return found


async def _call(pool: TokenizerPool, request: tokenizer_pb2.RenderRequest, work: Work) -> Rendered:
    try:
        return await pool.render(request)
    except ApiError as error:
        if error.code == "context_length_exceeded":
            raise bad_request(f"{error.message} {_ADVICE}", work.param, error.code) from None
        if error.status == 400 and work.chat is None:
            # The tokenizer names the field of its own request.
            raise bad_request(error.message, work.param, error.code) from None
        raise


def _kept(work: Work, model: Model) -> int | None:
    """Return the tokens to keep of a document; None: it must fit."""
    wanted = work.truncate
    if wanted is None:
        return None
    if wanted > model.max_model_len:
        raise bad_request(
            f"Invalid 'truncate_prompt_tokens': must be at most {model.max_model_len}, the model's longest "
            "input.",
            "truncate_prompt_tokens",
        )
    return model.max_model_len if wanted < 0 else wanted


def _check(document: Document, model: Model, param: str) -> None:
    ids = document.token_ids
    if len(ids) > model.max_model_len:
        raise bad_request(
            f"This model's longest input is {model.max_model_len} tokens, but one of '{param}' has "
            f"{len(ids)}. {_ADVICE}",
            param,
            "context_length_exceeded",
        )
    if not ids or min(ids) < 0 or max(ids) >= model.vocab_size:
        raise bad_request(
            f"Invalid '{param}': an id is out of vocabulary (0 to {model.vocab_size - 1}).", param
        )


def _chunks(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, in parts of moderate number and size; a large one is a part of its own."""
    chunk: list[T] = []
    chars = 0
    for item in items:
        if chunk and (len(chunk) == _CHUNK or chars + size(item) > _CHUNK_CHARS):
            yield chunk
            chunk, chars = [], 0
        chunk.append(item)
        chars += size(item)
    yield chunk
