"""Requests of an offline LLM for vectors and scores: read as those of HTTP, without their bounds."""

from __future__ import annotations

import json

import pytest

from catenary.text import Vocabulary
from catenary.v1 import common_pb2
from catenary_apps.llm.endpoint import LIMITS, DocumentFields, PairFields, document_work
from gateway import ApiError
from gateway.schemas.base import parse_request
from gateway.text.models import Model
from tests.support.tiny_tokenizer import VOCAB_SIZE, tokenizer_json

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
INFO = common_pb2.ModelInfo(
    name="m", tasks=[common_pb2.MODEL_TASK_EMBED], embedding_width=8, any_dimensions=True
)
MODEL = Model("m", 100, VOCAB_SIZE, VOCABULARY, INFO)


def test_requests_are_read() -> None:
    body = {"model": "m", "prompt": [1, 2], "dimensions": 3}
    assert parse_request(DocumentFields, body, LIMITS).prompt == [1, 2]
    pairs = parse_request(PairFields, {"model": "m", "first": ["a"], "second": ["b"]}, LIMITS)
    assert pairs.second == ["b"]


@pytest.mark.parametrize(("prompt", "texts", "ids"), [("a", ["a"], []), ([1, 2], [], [[1, 2]])])
def test_a_document_is_a_text_or_ids(prompt: str | list[int], texts: list[str], ids: list[list[int]]) -> None:
    fields = parse_request(DocumentFields, {"model": "m", "prompt": prompt, "dimensions": 3}, LIMITS)
    work = document_work(fields, MODEL)
    assert (list(work.texts), list(work.ids)) == (texts, ids)
    assert (work.task, work.dimensions) == (common_pb2.MODEL_TASK_EMBED, 3)


def test_a_document_may_not_ask_for_more_numbers_than_the_model_has() -> None:
    fields = parse_request(DocumentFields, {"model": "m", "prompt": "a", "dimensions": 9}, LIMITS)
    with pytest.raises(ApiError) as caught:
        document_work(fields, MODEL)
    assert caught.value.param == "dimensions"
