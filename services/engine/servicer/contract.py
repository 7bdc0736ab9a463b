"""Messages of the contract (protos/) made of what the core tells: identity, model, capacity, rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from catenary.columns import StepRow, split_columns
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import CoreReady, EndRow, HypothesisRow, ModelFacts, OfferedKv, StepColumns


@dataclass(frozen=True, slots=True)
class Identity:
    """The engine as it introduces itself to a router. `publish_kv`: routers may follow its prefix cache, if
    any."""

    instance_id: str
    engine_name: str
    version: str
    device: str
    served_model_name: str
    role: engine_pb2.EngineRole.ValueType = engine_pb2.ENGINE_ROLE_BOTH
    publish_kv: bool = True
    schema_revision: int = SCHEMA_REVISION
    minimum_peer_revision: int = MINIMUM_PEER_REVISION

    def hello(self, ready: CoreReady, state: engine_pb2.EngineState.ValueType) -> engine_pb2.EngineHello:
        """Return the first message of an attachment."""
        return engine_pb2.EngineHello(
            schema_revision=self.schema_revision,
            minimum_peer_revision=self.minimum_peer_revision,
            instance_id=self.instance_id,
            engine_name=self.engine_name,
            version=self.version,
            device=self.device,
            model=model_info(self.served_model_name, ready),
            capacity=capacity(ready),
            state=state,
            role=self.role,
            publishes_kv=self.publishes_kv(ready),
        )

    def publishes_kv(self, ready: CoreReady) -> bool:
        """Whether routers are told what is cached here."""
        return self.publish_kv and ready.publishes_kv


def model_info(served_model_name: str, ready: CoreReady) -> common_pb2.ModelInfo:
    """Return the description of the core's model."""
    model = ready.model
    return common_pb2.ModelInfo(
        name=served_model_name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        tokenizer_sha256=model.tokenizer_sha256,
        tasks=[task_of(model)],
        embedding_width=model.embedding_width,
        embedding_dimensions=model.embedding_dimensions,
        any_dimensions=model.any_dimensions,
        labels=model.labels,
        default_temperature=model.sampling_defaults.get("temperature"),
        default_top_p=model.sampling_defaults.get("top_p"),
    )


def task_of(model: ModelFacts) -> common_pb2.ModelTask.ValueType:
    return common_pb2.ModelTask.Value(f"MODEL_TASK_{model.task.upper()}")


def capacity(ready: CoreReady) -> engine_pb2.Capacity:
    """Return the capacity of the core."""
    facts = ready.capacity
    return engine_pb2.Capacity(
        block_size=facts.block_size,
        total_blocks=facts.total_blocks,
        max_running=facts.max_running,
        max_waiting=facts.max_waiting,
        max_batched_tokens=facts.max_batched_tokens,
    )


def _hypothesis_of(row: HypothesisRow) -> common_pb2.Hypothesis:
    message = common_pb2.Hypothesis(
        token_ids=row.token_ids,
        score=row.score,
        reason=(
            common_pb2.FINISH_REASON_STOP
            if row.reason is FinishReason.STOP
            else common_pb2.FINISH_REASON_LENGTH
        ),
        stop_token_id=row.stop_token_id,
    )
    if row.sampled is not None:
        columns = common_pb2.LogprobColumns(
            rows=[0],
            sampled=row.sampled,
            top_counts=row.top_counts,
            top_ids=row.top_ids,
            top_logprobs=row.top_logprobs,
        )
        message.logprobs.CopyFrom(columns)
    return message


def _offer_message(offer: OfferedKv) -> common_pb2.KvOffer:
    return common_pb2.KvOffer(
        connector=offer.connector,
        address=offer.address,
        ticket=offer.ticket,
        host_id=offer.host_id,
        blocks=offer.blocks,
        tokens=offer.tokens,
        layout=offer.layout,
    )


_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def rows_of(columns: StepColumns) -> Iterator[StepRow]:
    """Return the rows of a core's step; their handles are the core's keys."""
    ends = {end.row: _end_of(end) for end in columns.ends}
    return split_columns(
        columns.keys,
        columns.token_counts,
        columns.token_ids,
        columns.logprob_rows,
        columns,
        ends,
        columns.prompts,
    )


def _end_of(end: EndRow) -> common_pb2.SequenceEnd:
    message = common_pb2.SequenceEnd(
        reason=_REASONS[end.reason],
        usage=common_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            transferred_tokens=end.transferred_tokens,
        ),
        stop_token_id=end.stop_token_id,
        vector=end.vector,
        hypotheses=map(_hypothesis_of, end.hypotheses),
        kv_offer=None if end.kv_offer is None else _offer_message(end.kv_offer),
    )
    if message.reason == common_pb2.FINISH_REASON_ERROR:
        code = end.error_code or CoreErrorCode.INTERNAL
        message.error.code = common_pb2.ErrorCode.Value(f"ERROR_CODE_{code}")
        message.error.message = end.error_message or "The engine failed this sequence."
        if end.error_param is not None:
            message.error.param = end.error_param
        message.error.retryable = code in (CoreErrorCode.OVERLOADED, CoreErrorCode.INTERNAL)
    return message
