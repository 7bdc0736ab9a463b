"""Requests that have documents: texts, token ids, or one chat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.generation.chat_input import to_chat_input
from gateway.pooling.work import Work
from gateway.schemas.chat_pooling import ChatDocument
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import PooledFields, TextFields
from gateway.schemas.validation import parse_request
from gateway.text.models import Model

_Texts = TypeVar("_Texts", bound=TextFields)
_Chat = TypeVar("_Chat", bound=ChatDocument)


def read_documents(
    body: dict[str, Any], limits: RequestLimits, texts: type[_Texts], chat: type[_Chat]
) -> _Texts | _Chat:
    """A body with `input` as `texts`, one with `messages` as `chat`. Raises ApiError 400."""
    if body.get("messages") is None:
        return parse_request(texts, body, limits)
    if body.get("input") is not None:
        raise bad_request("Only one of 'input' and 'messages' is allowed.", "messages")
    return parse_request(chat, body, limits)


def document_work(
    fields: PooledFields,
    model: Model,
    task: common_pb2.ModelTask.ValueType,
    dimensions: int | None = None,
) -> Work:
    """The work of a request that `read_documents` read.

    Raises ApiError 400.

    Args:
        fields: the request.
        model: what computes it.
        task: the model's, or one of them.
        dimensions: of vectors, as of Work.
    """
    asked = Work(task, "input", dimensions=dimensions, truncate=fields.truncate_prompt_tokens, raw=fields.raw)
    if isinstance(fields, ChatDocument):
        if not model.traits.has_chat_template and fields.chat_template is None:
            raise bad_request(
                "This model has no chat template: use 'input', or have the server started with one.",
                "messages",
                "unsupported_value",
            )
        # No answer is wanted: its turn is begun only where that is asked for.
        begins = {"add_generation_prompt": bool(fields.add_generation_prompt)}
        chat = to_chat_input(fields.model_copy(update=begins), model.traits)
        return replace(asked, param="messages", chat=chat)
    if not isinstance(fields, TextFields):
        raise TypeError("a request of another route")
    return replace(
        asked,
        texts=[text for text in fields.input if isinstance(text, str)],
        ids=[ids for ids in fields.input if isinstance(ids, list)],
        add_special_tokens=fields.add_special_tokens is not False,
    )
