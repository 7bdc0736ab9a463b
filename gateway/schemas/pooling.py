"""`POST /v1/embeddings`, classify, pooling, rerank and score, of texts and of chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import bad_request
from gateway.schemas.base import (
    INT32_MAX,
    MODEL,
    PROMPTS_SCHEMA,
    FieldError,
    RequestLimits,
    RequestModel,
    limits_of,
    only_known,
    read_prompts,
)
from gateway.schemas.chat import ChatInputFields
from gateway.schemas.ignored import CHAT_EMBEDDING_FIELDS, EVERYWHERE, tree_of

_OFF: tuple[Any, ...] = ()
_KNOWN: dict[str, tuple[Any, ...]] = {
    "cache_salt": _OFF,
    "mm_processor_kwargs": ({},),
    "chat_template": _OFF,
    "chat_template_kwargs": ({},),
    "instruction": ("",),
    "softmax": (True,),
    "activation": (True,),
    "truncation_side": ("right",),
    "padding": ("do_not_pad",),
}

_EMBEDDING: dict[str, tuple[Any, ...]] = {
    **_KNOWN,
    "normalize": (True,),
    "messages": _OFF,
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "input_type": _OFF,
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
}
_CLASSIFY: dict[str, tuple[Any, ...]] = {
    **_KNOWN,
    "messages": _OFF,
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
}
_POOLING: dict[str, tuple[Any, ...]] = {**_EMBEDDING, "data": _OFF}
_RERANK: dict[str, tuple[Any, ...]] = {
    **_KNOWN,
    "rank_fields": ([],),
    "max_chunks_per_doc": _OFF,
}
_SCORE: dict[str, tuple[Any, ...]] = {**_KNOWN, "normalize": (True,)}

_TASKS = ("embed", "classify", "score")
_PER_TOKEN = ("token_embed", "token_classify")

# vLLM's names for the two sides of a score.
SCORE_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


def _read_input(value: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
    return read_prompts(value, limits_of(info).max_embedding_inputs, "inputs")


def _read_text(value: Any, field: str, at: str) -> str:
    """Read a text, or an object with one. `at`: its place among several of the field."""
    if isinstance(value, dict):
        path = (field, at) if at else (field,)
        if "text" not in value or not only_known(value, {"text"}, *path):
            raise FieldError("Invalid '{param}': an object must have a 'text' and nothing else.", at=at)
        value = value["text"]
    if not isinstance(value, str):
        raise FieldError("Invalid type for '{param}': expected a string.", "invalid_type", at)
    if not value:
        raise FieldError("Invalid '{param}': texts must not be empty.", at=at)
    return value


def _read_texts(value: Any, info: ValidationInfo) -> list[str]:
    listed = isinstance(value, list)
    if not listed:
        value = [value]
    if not value:
        raise FieldError("Invalid '{param}': must not be empty.")
    most = limits_of(info).max_pairs
    if len(value) > most:
        raise FieldError(f"Invalid '{{param}}': at most {most} texts are allowed.")
    return [
        _read_text(item, info.field_name or "", str(place) if listed else "")
        for place, item in enumerate(value)
    ]


def _read_documents(value: Any, info: ValidationInfo) -> list[str]:
    if not isinstance(value, list):
        raise FieldError("Invalid type for '{param}': expected an array.", "invalid_type")
    return _read_texts(value, info)


Texts = Annotated[list[str], PlainValidator(_read_texts), PROMPTS_SCHEMA]


class PooledFields(RequestModel):
    """Parameters that all routes share which compute vectors or scores."""

    ignored = tree_of(EVERYWHERE)

    model: str = MODEL
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Keep so many tokens of a longer text, from its start; -1: as many as the model takes.",
    )
    priority: int | None = Field(
        None, ge=-INT32_MAX, le=INT32_MAX, description="Requests with a lower number are computed first."
    )
    user: str | None = Field(None, max_length=1024, description="Accepted; not used.")
    use_activation: bool | None = Field(
        None,
        description="false: leave out the last step, which scales vectors to length 1, or makes scores and "
        "probabilities of logits.",
    )

    @property
    def raw(self) -> bool:
        return self.use_activation is False

    def check(self, limits: RequestLimits) -> None:
        low, high = limits.min_priority, limits.max_priority
        if self.priority is not None and not low <= self.priority <= high:
            raise bad_request(f"Invalid 'priority': must be between {low} and {high}.", "priority")
        if self.truncate_prompt_tokens == 0:
            raise bad_request(
                "Invalid 'truncate_prompt_tokens': must be at least 1, or -1.", "truncate_prompt_tokens"
            )


class EmbeddingFields(PooledFields):
    """Shape of vectors."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or the base64 of little-endian float32."
    )
    dimensions: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Keep so many numbers, scaled to length 1, if the model allows."
    )


class TextFields(PooledFields):
    """Documents as they are."""

    other_names = {"documents": "input", "prompt": "input", "text": "input", "texts": "input"}

    input: Annotated[list[str] | list[list[int]], PlainValidator(_read_input), PROMPTS_SCHEMA] = Field(
        description="Texts, or token ids of texts."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokens that the tokenizer puts around a text. Default: true."
    )


class EmbeddingRequest(EmbeddingFields, TextFields):
    """Texts to turn into vectors."""

    unsupported = _EMBEDDING


class ClassifyRequest(TextFields):
    """Texts to classify."""

    unsupported = _CLASSIFY


class PoolingFields(EmbeddingFields):
    """Options of a model that does not generate."""

    task: str | None = Field(
        None, max_length=64, description="embed, classify or score, if the model's own; null: what it is for."
    )

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.task in _PER_TOKEN:
            raise bad_request(
                f"Unsupported 'task': {self.task}, which gives a number or a vector for each token, is not "
                "supported by this server yet.",
                "task",
                "unsupported_value",
            )
        if self.task is not None and self.task not in _TASKS:
            raise bad_request(f"Invalid 'task': must be one of {', '.join(_TASKS)}.", "task")


class PoolingRequest(PoolingFields, TextFields):
    """Texts to run through a model that does not generate."""

    unsupported = _POOLING


class RerankRequest(PooledFields):
    """Documents to sort by how well they answer a query."""

    unsupported = _RERANK

    query: str = Field(min_length=1, description="What is looked for.")
    documents: Annotated[list[str], PlainValidator(_read_documents), WithJsonSchema({"type": "array"})] = (
        Field(description="Texts, or objects with a text.")
    )
    top_n: int | None = Field(None, ge=0, le=INT32_MAX, description="So many of the best; 0: all.")
    max_tokens_per_doc: int | None = Field(
        None,
        ge=0,
        le=INT32_MAX,
        description="Keep so many tokens of a longer document, from its start; 0: all.",
    )
    return_documents: bool | None = Field(None, description="Send the documents' texts with the results.")


class ScoreRequest(PooledFields):
    """Pairs of texts to compare: one with many, or each with the one at its place."""

    unsupported = _SCORE

    text_1: Texts | None = Field(None, description="One text, or several.")
    text_2: Texts | None = Field(None, description="As many texts, or any number for one text_1.")
    data_1: Texts | None = Field(None, description="The same as text_1.")
    data_2: Texts | None = Field(None, description="The same as text_2.")
    queries: Texts | None = Field(None, description="The same as text_1.")
    documents: Texts | None = Field(None, description="The same as text_2.")
    items: Texts | None = Field(None, description="The same as text_2.")

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """First and second text of each pair."""
        names = self.names
        first: list[str] = getattr(self, names[0])
        second: list[str] = getattr(self, names[1])
        return (first * len(second) if len(first) == 1 else first), second

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        names = self.names
        first, second = (len(getattr(self, name)) for name in names)
        if first not in (1, second):
            raise bad_request(
                f"Invalid '{names[1]}': one '{names[0]}' goes with any number of them, several with as many.",
                names[1],
            )

    @property
    def names(self) -> tuple[str, str]:
        """Names by which the two sides were given. Raises ApiError 400."""
        given = {name for pair in SCORE_SIDES for name in pair if getattr(self, name) is not None}
        for pair in SCORE_SIDES:
            if given == set(pair):
                return pair
        missing = "text_2" if "text_1" in given else "text_1"
        raise bad_request(
            "A score needs two sides: 'text_1' and 'text_2', and no other names for them.",
            missing,
            "missing_required_parameter",
        )


def _unsupported(of_texts: type[PooledFields]) -> dict[str, Any]:
    """Return the parameters that a chat refuses: those refused by `of_texts` but no chat's, and `input`."""
    kept = {
        name: neutral
        for name, neutral in of_texts.unsupported.items()
        if name not in ChatInputFields.model_fields
    }
    return {**kept, "input": ()}


class ChatDocument(PooledFields, ChatInputFields):
    """A chat that is one document."""

    ignored = tree_of(CHAT_EMBEDDING_FIELDS)

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.check_chat_input()
        self.check_tools(limits)


class ChatEmbeddingRequest(EmbeddingFields, ChatDocument):
    """A chat to turn into one vector."""

    unsupported = _unsupported(EmbeddingRequest)


class ChatClassifyRequest(ChatDocument):
    """Messages that are classified as one text, by the chat template."""

    unsupported = _unsupported(ClassifyRequest)


class ChatPoolingRequest(PoolingFields, ChatDocument):
    """A chat to run through a model that does not generate."""

    unsupported = _unsupported(PoolingRequest)
