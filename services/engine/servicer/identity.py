"""Who an engine says it is, and its core's facts in the contract's words."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.engine.link import CoreReady, ModelFacts


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine says it is. `publish_kv`: routers may follow its prefix cache, if it has one."""

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
        """The first message of an attachment."""
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
    """The core's model as the contract describes it."""
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
        default_temperature=model.default_temperature,
        default_top_p=model.default_top_p,
    )


def task_of(model: ModelFacts) -> common_pb2.ModelTask.ValueType:
    """The model's task in the contract's words."""
    return common_pb2.ModelTask.Value(f"MODEL_TASK_{model.task.upper()}")


def capacity(ready: CoreReady) -> engine_pb2.Capacity:
    """The core's capacity as the contract describes it."""
    facts = ready.capacity
    return engine_pb2.Capacity(
        block_size=facts.block_size,
        total_blocks=facts.total_blocks,
        max_running=facts.max_running,
        max_waiting=facts.max_waiting,
        max_batched_tokens=facts.max_batched_tokens,
    )
