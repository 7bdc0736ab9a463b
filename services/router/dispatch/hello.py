"""Checks of an engine's hello. It is kept, passed on to gateways and used in sums: each part is bounded."""

from __future__ import annotations

import re

from catenary.schema import MAX_EOS_TOKEN_IDS, MAX_LABEL_LENGTH, MAX_LABELS, revision_mismatch
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import MAX_NAME_LENGTH, Refused

# Of what an engine says of itself, far above any model there is. An engine beyond them is faulty.
MAX_FACT_LENGTH = 64
MAX_TASKS = 8
MAX_EMBEDDING_WIDTH = 1 << 16
MAX_EMBEDDING_DIMENSIONS = 64
MAX_VOCAB_SIZE = 1 << 24
MAX_MODEL_LEN = 1 << 24
MAX_BLOCK_SIZE = 1 << 16
MAX_BLOCKS = 1 << 31
MAX_SEQUENCES = 1 << 20
MAX_BATCHED_TOKENS = 1 << 24

_SHA256 = re.compile(r"[0-9a-f]{64}|")


def check_hello(hello: engine_pb2.EngineHello) -> None:
    """Check a hello by itself; the limits are those of engine.proto and common.proto.

    Raises:
        Refused: the text says what is wrong and, for the schema, names both revisions.
    """
    mismatch = revision_mismatch(hello.schema_revision, hello.minimum_peer_revision, peer="engine")
    if mismatch is not None:
        raise Refused(common_pb2.ERROR_CODE_SCHEMA_MISMATCH, mismatch)
    model = hello.model
    for what, text in (
        ("instance_id", hello.instance_id),
        ("engine_name", hello.engine_name),
        ("model", model.name),
    ):
        if not 1 <= len(text) <= MAX_NAME_LENGTH:
            raise _invalid(what, f"The hello's {what} must have 1 to {MAX_NAME_LENGTH} characters.")
    for what, text in (("version", hello.version), ("device", hello.device), ("dtype", model.dtype)):
        if len(text) > MAX_FACT_LENGTH:
            raise _invalid(what, f"The hello's {what} has more than {MAX_FACT_LENGTH} characters.")
    if not known_state(hello.state):
        raise _invalid("state", "The hello's state is not one of the contract's.")
    if hello.role not in engine_pb2.EngineRole.values():
        raise _invalid("role", "The hello's role is not one of the contract's.")
    _check_model(model)
    _check_capacity(hello.capacity)


def known_state(state: int) -> bool:
    """Whether `state` is a state that an engine can be in."""
    return state != engine_pb2.ENGINE_STATE_UNSPECIFIED and state in engine_pb2.EngineState.values()


def _check_model(model: common_pb2.ModelInfo) -> None:
    _check_number("max_model_len", model.max_model_len, 1, MAX_MODEL_LEN)
    _check_number("vocab_size", model.vocab_size, 1, MAX_VOCAB_SIZE)
    if len(model.eos_token_ids) > MAX_EOS_TOKEN_IDS:
        raise _invalid("eos_token_ids", f"The hello has more than {MAX_EOS_TOKEN_IDS} eos_token_ids.")
    if max(model.eos_token_ids, default=0) >= model.vocab_size:
        raise _invalid("eos_token_ids", "One of the hello's eos_token_ids is not below vocab_size.")
    if not _SHA256.fullmatch(model.tokenizer_sha256):
        raise _invalid("tokenizer_sha256", "The hello's tokenizer_sha256 is not 64 hex digits.")
    _check_tasks(model)


def _check_tasks(model: common_pb2.ModelInfo) -> None:
    tasks, width = model.tasks, model.embedding_width
    known = set(common_pb2.ModelTask.values()) - {common_pb2.MODEL_TASK_UNSPECIFIED}
    if len(tasks) > MAX_TASKS or not known.issuperset(tasks):
        raise _invalid("tasks", "The hello's tasks are not those of the contract.")
    _check_number("embedding_width", width, 0, MAX_EMBEDDING_WIDTH)
    if (common_pb2.MODEL_TASK_EMBED in tasks) != (width > 0):
        raise _invalid("embedding_width", "A hello has an embedding_width if and only if its model embeds.")
    dimensions = model.embedding_dimensions
    if len(dimensions) > MAX_EMBEDDING_DIMENSIONS or not all(1 <= number <= width for number in dimensions):
        raise _invalid("embedding_dimensions", "The hello's embedding_dimensions are not widths of vectors.")
    labels = model.labels
    if (common_pb2.MODEL_TASK_CLASSIFY in tasks) != bool(labels):
        raise _invalid("labels", "A hello has labels if and only if its model classifies.")
    if len(labels) > MAX_LABELS or max(map(len, labels), default=0) > MAX_LABEL_LENGTH:
        raise _invalid(
            "labels",
            f"The hello has more than {MAX_LABELS} labels, or one of over {MAX_LABEL_LENGTH} characters.",
        )


def _check_capacity(capacity: engine_pb2.Capacity) -> None:
    _check_number("block_size", capacity.block_size, 1, MAX_BLOCK_SIZE)
    _check_number("total_blocks", capacity.total_blocks, 1, MAX_BLOCKS)
    _check_number("max_running", capacity.max_running, 1, MAX_SEQUENCES)
    _check_number("max_waiting", capacity.max_waiting, 0, MAX_SEQUENCES)
    _check_number("max_batched_tokens", capacity.max_batched_tokens, 0, MAX_BATCHED_TOKENS)


def _check_number(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise _invalid(what, f"The hello's {what} is {value}; it must be between {least} and {most}.")


def _invalid(param: str, message: str) -> Refused:
    return Refused(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param)
