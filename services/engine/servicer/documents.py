"""Admission of documents: what is to become a vector, a score or classes."""

from __future__ import annotations

from catenary.v1 import common_pb2
from services.engine.domain import PoolingOptions, SamplingOptions
from services.engine.link import ModelFacts, SubmitSequence
from services.engine.servicer.identity import task_of
from services.engine.servicer.inadmissible import Inadmissible


def resolve_document(
    spec: common_pb2.SequenceSpec, model: ModelFacts, context: int, key: int
) -> SubmitSequence:
    """The document for the core, under `key`. `context`: the longest one in tokens. Raises Inadmissible."""
    pooling, total = spec.pooling, len(spec.token_ids)
    if pooling.task != task_of(model) or model.task == "generate":
        raise Inadmissible(f"This engine's model is served for another task: {model.task}.", "model")
    for name in ("sampling", "stopping", "response", "constraint", "beam_search"):
        if spec.HasField(name):
            raise Inadmissible(f"{name} has no meaning where nothing is generated.", name)
    if total == 0:
        raise Inadmissible("The document is empty.", "input")
    if spec.HasField("prompt_len") and spec.prompt_len != total:
        raise Inadmissible(f"prompt_len must be the number of token ids, {total}.", "prompt_len")
    if total > context:
        raise Inadmissible(
            f"The document has {total} tokens; the longest one here has {context}.",
            "input",
            common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        )
    if max(spec.token_ids) >= model.vocab_size:
        raise Inadmissible(f"A token id is not below the vocabulary size, {model.vocab_size}.", "input")
    if pooling.HasField("second_start") and not 1 <= pooling.second_start < total:
        raise Inadmissible(f"second_start must be between 1 and {total - 1}.", "second_start")
    return SubmitSequence(
        key=key,
        token_ids=list(spec.token_ids),
        prompt_len=total,
        sampling=SamplingOptions(),
        max_tokens=0,
        min_tokens=0,
        stop_token_ids=[],
        ignore_eos=False,
        priority=spec.priority,
        pooling=PoolingOptions(_dimensions(pooling, model), pooling.second_start, pooling.raw),
    )


def _dimensions(pooling: common_pb2.Pooling, model: ModelFacts) -> int:
    """The width to cut to, 0 for none."""
    if not pooling.HasField("dimensions"):
        return 0
    wanted, width = pooling.dimensions, model.embedding_width
    allowed = 1 <= wanted <= width and (model.any_dimensions or wanted in model.embedding_dimensions)
    if wanted != width and not allowed:
        raise Inadmissible("The model's vectors cannot be cut to so many dimensions.", "dimensions")
    # The whole width asks for nothing.
    return 0 if wanted == width else wanted
