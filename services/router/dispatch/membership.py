"""Engines that join and leave: hello, lease, replacement, loss.

A hello is kept, passed on to gateways and used in sums, so each part of it is checked against a bound.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from enum import StrEnum

from catenary.schema import MAX_EOS_TOKEN_IDS, MAX_LABEL_LENGTH, MAX_LABELS, revision_mismatch
from catenary.sequence_limits import MAX_NAME
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.dispatch.dispatcher import ENGINE_LOST, Dispatcher
from services.router.dispatch.health import EngineHealth
from services.router.dispatch.sequence import AbortCause, EngineLink
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics

# Bounds of a hello, far above any model there is. An engine beyond them is faulty.
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
        if not 1 <= len(text) <= MAX_NAME:
            raise _invalid(what, f"The hello's {what} must have 1 to {MAX_NAME} characters.")
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


_log = get_logger(__name__)


class LossReason(StrEnum):
    """Why an engine left. A closed set: it labels a metric."""

    STREAM_ENDED = "stream_ended"
    LEASE_EXPIRED = "lease_expired"
    REPLACED = "replaced"
    PROTOCOL = "protocol"
    NOT_READING = "not_reading"
    ROUTER_STOPPED = "router_stopped"


# Ends of attachments that no engine died of: it came back by itself, or its router goes.
_IN_ORDER = frozenset({LossReason.REPLACED, LossReason.ROUTER_STOPPED})

_TEXTS = {
    LossReason.LEASE_EXPIRED: "The engine was silent for longer than its lease.",
    LossReason.REPLACED: "The engine attached again; this attachment is over.",
    LossReason.NOT_READING: "The engine did not read its stream.",
    LossReason.ROUTER_STOPPED: "The router is shutting down.",
}


class Membership:
    """Attaches and detaches engines, in the fleet and in the dispatcher at once.

    `on_change` is called after each change of membership or of an engine's state.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        health: EngineHealth,
        *,
        max_engines: int,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._health = health
        self._max_engines = max_engines
        self._on_change = on_change
        self._clock = clock

    def attach(self, hello: engine_pb2.EngineHello) -> EngineLink:
        """Attach an engine under a new epoch; end an older attachment of the same instance.

        Raises:
            Refused: the hello breaks the contract; for the schema, the text names both revisions.
        """
        self._check(hello)
        engine, replaced = self._fleet.attach(hello, now=self._clock(), unix_time=time.time())
        link = self._dispatcher.connect(engine)
        # First the new one: it may be given the sequences that the old one loses.
        if replaced is not None and (old := self._dispatcher.link_of(replaced)) is not None:
            self.leave(old, LossReason.REPLACED)
        _log.info(
            "engine attached",
            engine=engine.name,
            instance=engine.instance_id,
            epoch=engine.epoch,
            model=engine.model.name,
            device=engine.device,
        )
        self._on_change()
        return link

    def leave(self, link: EngineLink, reason: LossReason, error: common_pb2.Error | None = None) -> None:
        """End an attachment, its stream with `error`, and its sequences. The first call counts."""
        if link.closed:
            return
        if error is None and (text := _TEXTS.get(reason)) is not None:
            error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message=text, retryable=True)
        link.end(error)
        if reason is not LossReason.ROUTER_STOPPED:
            self._health.failed(link.engine)
        self._fleet.detach(link.engine)
        ended = self._dispatcher.lose(link, died=reason not in _IN_ORDER)
        self._metrics.engine_losses.labels(reason).inc()
        _log.info(
            "engine left",
            engine=link.engine.name,
            instance=link.engine.instance_id,
            reason=reason,
            ended=ended,
        )
        self._on_change()

    def receive(self, link: EngineLink, request: engine_pb2.AttachRequest) -> None:
        """Handle one message of an attached engine.

        Raises:
            Refused: another epoch than the granted one, a message that has no place here, an unknown state.
            MalformedStep: a step whose columns contradict one another.
        """
        if link.closed:
            return
        if request.lease_epoch != link.engine.epoch:
            raise Refused(
                common_pb2.ERROR_CODE_SCHEMA_MISMATCH,
                f"The message has lease epoch {request.lease_epoch}, this attachment {link.engine.epoch}.",
            )
        link.engine.heard(self._clock())
        match request.WhichOneof("payload"):
            case "step":
                self._health.stepped(link.engine)
                self._dispatcher.on_step(link, request.step)
            case "load":
                self._report(link, request.load)
            case "refusal":
                self._dispatcher.on_refusal(link, request.refusal)
            case "abort_result":
                self._dispatcher.on_abort_result(link, request.abort_result)
            case _:
                raise Refused(
                    common_pb2.ERROR_CODE_INVALID_ARGUMENT, "Only the first message of a stream is a hello."
                )

    def drain(self, name: str, deadline_ms: int | None) -> list[str]:
        """Tell the engines with this instance id or name to finish their sequences and end.

        Returns:
            Their instance ids.
        """
        told = []
        for engine in self._fleet.named(name):
            if (link := self._dispatcher.link_of(engine)) is None:
                continue
            engine.draining = True
            link.drain(engine_pb2.DrainEngine(deadline_ms=deadline_ms))
            told.append(engine.instance_id)
            _log.info("engine told to drain", engine=engine.name, instance=engine.instance_id)
        if told:
            self._on_change()
        return told

    def sweep(self) -> None:
        """End the attachments whose lease ran out."""
        for engine in self._fleet.expired(self._clock()):
            if (link := self._dispatcher.link_of(engine)) is not None:
                self.leave(link, LossReason.LEASE_EXPIRED)

    def give_up_all(self, error: common_pb2.Error) -> int:
        """End all sequences with `error`, as the time to drain is over. Returns how many."""
        links = [self._dispatcher.link_of(engine) for engine in self._fleet]
        connected = [link for link in links if link is not None]
        return sum(self._dispatcher.give_up(link, error, AbortCause.DRAIN) for link in connected)

    def leave_all(self) -> None:
        """End every attachment: the router stops."""
        for engine in list(self._fleet):
            if (link := self._dispatcher.link_of(engine)) is not None:
                self.leave(link, LossReason.ROUTER_STOPPED)

    def _report(self, link: EngineLink, report: engine_pb2.LoadReport) -> None:
        if not known_state(report.state):
            raise Refused(
                common_pb2.ERROR_CODE_INVALID_ARGUMENT,
                "The report's state is not one of the contract's.",
                param="state",
            )
        before = (link.engine.state, link.engine.serving)
        link.engine.apply(report)
        link.renew(report.sequence)
        self._dispatcher.lifecycle.pump_soon()
        if (link.engine.state, link.engine.serving) != before:
            self._on_change()

    def _check(self, hello: engine_pb2.EngineHello) -> None:
        check_hello(hello)
        if (conflict := self._fleet.conflict(hello.model, hello.instance_id)) is not None:
            raise Refused(common_pb2.ERROR_CODE_INVALID_ARGUMENT, conflict, param="model")
        if len(self._fleet) >= self._max_engines and not self._fleet.attached(hello.instance_id):
            raise Refused(
                common_pb2.ERROR_CODE_OVERLOADED,
                f"The router has its limit of {self._max_engines} engines (max-engines).",
                retryable=True,
            )


class StallWatch:
    """Ends the sequences of engines that have work and made no step for `limit_s`.

    A stalled engine may still send reports. It is given nothing until it makes a step.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        health: EngineHealth,
        metrics: RouterMetrics,
        *,
        limit_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._health = health
        self._metrics = metrics
        self._limit_s = limit_s
        self._on_change = on_change
        self._clock = clock

    def sweep(self) -> None:
        """Look at all engines."""
        limit = self._clock() - self._limit_s
        for engine in list(self._fleet):
            link = self._dispatcher.link_of(engine)
            if engine.stalled or link is None or not link.sequences or engine.progress_at >= limit:
                continue
            engine.stalled = True
            ended = self._dispatcher.give_up(link, ENGINE_LOST, AbortCause.STALLED)
            self._metrics.engine_stalls.inc()
            _log.warning("engine makes no step", engine=engine.name, limit_s=self._limit_s, ended=ended)
            self._health.failed(engine)
            self._on_change()
