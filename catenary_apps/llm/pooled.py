"""Calls of models that embed, score or classify."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from catenary.v1 import common_pb2
from catenary_apps.llm.calls import Calls
from catenary_apps.llm.endpoint import DocumentFields, PairFields, document_work
from catenary_apps.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from catenary_apps.llm.prompts import Prompt, check_arguments, read_one, read_prompts, read_texts
from catenary_apps.llm.sampling_params import PoolingParams
from gateway import Caller
from gateway.pooling.answers import compare, scores_of, unpack
from gateway.pooling.work import Pooled
from gateway.schemas.base import parse_request

EMBED = (common_pb2.MODEL_TASK_EMBED,)
# A score is the probability of the one class that its model has.
CLASSIFY = (common_pb2.MODEL_TASK_CLASSIFY, common_pb2.MODEL_TASK_SCORE)
SCORE = (common_pb2.MODEL_TASK_SCORE, common_pb2.MODEL_TASK_EMBED)
_TASKS = {"embed": EMBED, "classify": CLASSIFY, "score": SCORE[:1], None: EMBED + CLASSIFY}
_PER_TOKEN = ("token_embed", "token_classify")
# Pairs of one request: in it, a query that comes with many documents is embedded once.
_PAIRS = 64


class PooledCalls(Calls):
    """Calls of an LLM for models that do not generate."""

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the model's numbers for texts, in order: a vector, a score, or one number for each class.

        Args:
            prompts: one or several.
            pooling_params: for all.
            pooling_task: embed, classify or score: refuse a model that is for something else.
            truncate_prompt_tokens: as in PoolingParams.
            use_tqdm: show what is done; None: as the LLM was told.
            others: arguments of vLLM's that there are none of here, as lora_request; None asks for nothing.

        Raises:
            TypeError: what is given is of a wrong kind.
            ValueError: a prompt or parameter cannot be honoured.
            RuntimeError: the engine failed.
        """
        params = self._params("encode", _tasks_of("pooling_task", pooling_task), pooling_params, others)
        found = self._documents(prompts, params, truncate_prompt_tokens, use_tqdm)
        # Loaded by the engine by now, and by nothing before.
        torch: Any = importlib.import_module("torch")
        return [
            PoolingRequestOutput(*_head(one), PoolingOutput(torch.tensor(unpack(one.vectors[0]))))
            for one in found
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return vectors of texts, in order. `dimensions` as in PoolingParams, all else as of `encode`."""
        params = self._params("embed", EMBED, pooling_params, others)
        if dimensions is not None:
            params = replace(params, dimensions=dimensions)
        found = self._documents(prompts, params, truncate_prompt_tokens, use_tqdm)
        return [
            EmbeddingRequestOutput(*_head(one), EmbeddingOutput(list(unpack(one.vectors[0]))))
            for one in found
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return probabilities of the model's classes for texts, in order. Arguments as of `encode`."""
        params = self._params("classify", CLASSIFY, pooling_params, others)
        found = self._documents(prompts, params, truncate_prompt_tokens, use_tqdm)
        return [
            ClassificationRequestOutput(*_head(one), ClassificationOutput(list(unpack(one.vectors[0]))))
            for one in found
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts belong together: one with each of several, or each with the one at its place.

        By a model that scores pairs, or by the cosine of two vectors of one that embeds. Arguments and errors
        as of `encode`.
        """
        params = self._params("score", SCORE, pooling_params, others)
        if params.dimensions is not None:
            raise ValueError("dimensions has no meaning for a score")
        body = _body(params, truncate_prompt_tokens)
        requests = [
            partial(self._pair, body | {"first": first, "second": second})
            for first, second in _pairs(read_texts("text_1", text_1), read_texts("text_2", text_2))
        ]
        return list(chain.from_iterable(self._run(self._many(requests, use_tqdm))))

    def _params(
        self, method: str, tasks: Collection[int], given: PoolingParams | None, others: Mapping[str, Any]
    ) -> PoolingParams:
        """Return the parameters of a call to a model for one of these tasks.

        Raises TypeError and ValueError.
        """
        self._require(method, tasks)
        check_arguments(method, others)
        params = PoolingParams() if given is None else read_one(PoolingParams, "pooling_params", given)
        self._require(method, _tasks_of("pooling_params.task", params.task))
        return params

    def _documents(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams,
        truncate: int | None,
        use_tqdm: bool | None,
    ) -> list[Pooled]:
        body = _body(params, truncate)
        requests = [partial(self._document, body | prompt.body) for prompt in read_prompts(prompts)]
        return self._run(self._many(requests, use_tqdm))

    async def _document(self, body: dict[str, Any]) -> Pooled:
        stack = self._stack
        fields = parse_request(DocumentFields, {"model": stack.name, **body}, stack.requests.limits)
        async with stack.requests.detached(Caller()) as request:
            model = request.admit(fields, (stack.task,))
            return await stack.poolings.run(
                document_work(fields, model), model, request, id_prefix="offline-"
            )

    async def _pair(self, body: dict[str, Any]) -> list[ScoringRequestOutput]:
        stack = self._stack
        fields = parse_request(PairFields, {"model": stack.name, **body}, stack.requests.limits)
        async with stack.requests.detached(Caller()) as request:
            model = request.admit(fields, SCORE)
            work = compare(fields.first, fields.second, model, fields, param="second")
            pooled = await stack.poolings.run(work, model, request, id_prefix="offline-")
        pairs = [(place,) for place in range(len(pooled.documents))]
        places: Sequence[tuple[int, ...]] = pooled.work.compared or pairs
        return [
            ScoringRequestOutput(
                f"{pooled.request_id}-{index}",
                [token for place in found for token in pooled.documents[place].token_ids],
                ScoringOutput(score),
            )
            for index, (found, score) in enumerate(zip(places, scores_of(pooled), strict=True))
        ]


def _tasks_of(name: str, task: Any) -> Collection[int]:
    """Return the tasks of models that do what is named so; None: any of them. Raises ValueError."""
    if task is not None and not isinstance(task, str):
        raise TypeError(f"{name} must be embed, classify or score, not {type(task).__name__}")
    if task in _PER_TOKEN:
        raise ValueError(f"{name} {task!r}: a number or vector for each token is not done yet")
    if task not in _TASKS:
        raise ValueError(f"{name} must be embed, classify or score, not {task!r}")
    return _TASKS[task]


def _body(params: PoolingParams, truncate: int | None) -> dict[str, Any]:
    if truncate is not None:
        params = replace(params, truncate_prompt_tokens=truncate)
    return params.body()


def _head(pooled: Pooled) -> tuple[str, list[int]]:
    return pooled.request_id, list(pooled.documents[0].token_ids)


def _pairs(first: list[str], second: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield parts of the pairs, in order."""
    if len(first) not in (1, len(second)):
        raise ValueError(
            f"one text_1 goes with any number of text_2, several with as many: there are {len(first)} and "
            f"{len(second)}"
        )
    first = first * len(second) if len(first) == 1 else first
    for begin in range(0, len(second), _PAIRS):
        yield first[begin : begin + _PAIRS], second[begin : begin + _PAIRS]
