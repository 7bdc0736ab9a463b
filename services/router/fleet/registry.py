"""The attached engines, the models they serve, and each model's engines as columns.

The columns (`EngineColumns`) let a policy weigh a thousand engines at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from catenary.v1 import common_pb2, engine_pb2, router_pb2
from services.router.fleet.breaker import BreakerOptions, Breakers
from services.router.fleet.engine import Engine

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class EngineColumns:
    """The engines of a model as columns, one row for each. The fleet makes new ones when an engine joins or
    leaves, and refreshes rows until then.

    Columns of float64: `sequences`, `tokens`, `prefill`, `room` (see Engine); `held`, the KvLoad's;
    `reported_at`; and, of the capacity, `slots`, `kv_tokens` and `block_size`. `epochs`, int64, rise with the
    rows.
    `identity`, uint64, is drawn from each engine's name and stays the same when the engine starts again.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        count = len(self.engines)
        self.sequences, self.tokens, self.prefill, self.reported_at = np.zeros((4, count))
        self.room, self.held = np.zeros((2, count))
        self.slots = _column([engine.capacity.max_running or 1 for engine in engines])
        self.block_size = _column([engine.capacity.block_size for engine in engines])
        self.kv_tokens = _column([engine.kv_tokens or 1 for engine in engines])
        self.block_sizes = tuple(sorted({engine.capacity.block_size for engine in engines}))
        self.epochs = np.array([engine.epoch for engine in engines], dtype=np.int64)
        self.identity = np.array(_identities(engines), dtype=np.uint64)
        self._roles = np.array([engine.role for engine in engines], dtype=np.int64)
        self.roles = frozenset(engine.role for engine in engines)
        """The roles of its engines: most fleets need not be looked through for one of them."""
        self._publishes = np.array([engine.publishes_kv for engine in engines], dtype=np.bool_)
        # Rows of those that are reserved.
        self._reserved: set[int] = set()
        self._available = np.zeros(count, dtype=np.bool_)
        self._row_of = {engine.epoch: row for row, engine in enumerate(engines)}
        for row, engine in enumerate(engines):
            engine.row = row
            self.refresh(engine)

    def __len__(self) -> int:
        return len(self.engines)

    def refresh(self, engine: Engine) -> None:
        """Take over what `engine`, which has a row here, is now."""
        row = engine.row
        self.sequences[row] = engine.sequences
        self.tokens[row] = engine.tokens
        self.prefill[row] = engine.prefill
        self.room[row] = engine.room
        self.held[row] = engine.kv.held
        self.reported_at[row] = engine.reported_at
        self._available[row] = engine.available
        if engine.reserved_for is None:
            self._reserved.discard(row)
        else:
            self._reserved.add(row)

    def row_of(self, epoch: int) -> int | None:
        """Return the row of the attachment with this epoch, or None."""
        return self._row_of.get(epoch)

    def open_to(
        self, role: engine_pb2.EngineRole.ValueType | None, excluding: Collection[Engine] = ()
    ) -> Mask:
        """Which engines may be given a sequence, less `excluding`.

        Those whose breaker is open are left out, and one that is half open and has a sequence. `role` is as
        for Engine.does.
        """
        mask: Mask = self._available.copy()
        if role is None:
            if engine_pb2.ENGINE_ROLE_PREFILL in self.roles:
                mask &= self._roles != engine_pb2.ENGINE_ROLE_PREFILL
        elif role != engine_pb2.ENGINE_ROLE_UNSPECIFIED:
            mask &= self._roles == role
        for engine in excluding:
            if (row := self._row_of.get(engine.epoch)) is not None:
                mask[row] = False
        return mask

    def free_for(self, owner: object) -> Mask:
        """Return the mask of engines that are not reserved for another one than `owner`."""
        mask: Mask = np.ones(len(self.engines), dtype=np.bool_)
        for row in self._reserved:
            mask[row] = self.engines[row].reserved_for is owner
        return mask

    def roomy(self, sequences: int, tokens: int | Floats = 0) -> Mask:
        """Which engines are given so many more sequences now, which need so many tokens of KV together.

        More than run at once are given to an empty one. One that does not tell what is in its cache may need
        fewer blocks than it seems, so that its KV is looked at alone. `tokens` may be a column.
        """
        mask: Mask = self.room >= np.minimum(sequences, self.slots)
        if isinstance(tokens, int) and not tokens:
            return mask
        needed = np.ceil(tokens / self.block_size) * self.block_size
        more = np.where(self._publishes, needed, self.block_size)
        fits: Mask = (self.sequences == 0) | (needed == 0) | (self.held + more <= self.kv_tokens)
        return mask & fits & (needed <= self.kv_tokens)


def has_room(engine: Engine, sequences: int, tokens: int) -> bool:
    """Return EngineColumns.roomy of one engine, in a tenth of the time."""
    if engine.room < min(sequences, engine.capacity.max_running or 1):
        return False
    if not tokens:
        return True
    size, most = engine.capacity.block_size, engine.kv_tokens or 1
    needed = -(-tokens // size) * size
    more = needed if engine.publishes_kv else size
    return needed <= most and (engine.sequences == 0 or engine.kv.held + more <= most)


def _column(values: Sequence[int]) -> Floats:
    return np.array(values, dtype=np.float64)


def _identities(engines: Sequence[Engine]) -> list[int]:
    """Return 64 bits for each engine; those that share a name are told apart by their order."""
    seen: dict[str, int] = {}
    identities = []
    for engine in engines:
        number = seen[engine.name] = seen.get(engine.name, -1) + 1
        digest = blake2b(f"{number}/{engine.name}".encode(), digest_size=8)
        identities.append(int.from_bytes(digest.digest(), "little"))
    return identities


# Models that stay listed after their last engine left.
MAX_DEPARTED_MODELS = 64
UINT32_MAX = (1 << 32) - 1


@dataclass(slots=True)
class KnownModel:
    """A model that was attached here at least once."""

    info: common_pb2.ModelInfo
    created: int


class Fleet:
    """Membership. Pure: the caller passes the time and owns the streams.

    `lease_s`: silence after which an engine counts as lost. `breaker`: options of the engines' breakers.
    `backlog`: sequences that an engine is given beyond those it runs at once, if it lets so many wait.
    """

    def __init__(self, *, lease_s: float, breaker: BreakerOptions | None = None, backlog: int = 0) -> None:
        self._lease_s = lease_s
        self._breakers = Breakers(breaker or BreakerOptions())
        self._backlog = backlog
        self._by_instance: dict[str, Engine] = {}
        self._models: dict[str, KnownModel] = {}
        # Those of them that no engine has, in the order in which they were left.
        self._departed: dict[str, None] = {}
        self._last_epoch = 0
        self._columns: dict[str, EngineColumns] = {}
        self._stale: set[Engine] = set()

    def __len__(self) -> int:
        return len(self._by_instance)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._by_instance.values())

    def attach(
        self, hello: engine_pb2.EngineHello, *, now: float, unix_time: float
    ) -> tuple[Engine, Engine | None]:
        """Register an engine under a new epoch.

        Returns:
            The engine, and the older attachment of the same instance id that it replaces, already removed.
        """
        replaced = self._by_instance.pop(hello.instance_id, None)
        # The old link's loss is still to be counted against it.
        breaker = replaced.breaker if replaced is not None else self._breakers.take(hello.engine_name, now)
        self._last_epoch += 1
        engine = Engine(
            instance_id=hello.instance_id,
            name=hello.engine_name,
            version=hello.version,
            device=hello.device,
            model=hello.model,
            capacity=hello.capacity,
            epoch=self._last_epoch,
            state=hello.state,
            last_heard=now,
            role=hello.role or engine_pb2.ENGINE_ROLE_BOTH,
            publishes_kv=hello.publishes_kv,
            breaker=breaker,
            progress_at=now,
            reported_at=now,
            backlog=min(self._backlog, hello.capacity.max_waiting),
            stale=self._stale,
        )
        self._by_instance[engine.instance_id] = engine
        self._columns.pop(engine.model.name, None)
        self._remember(engine, int(unix_time))
        if replaced is not None:
            self._depart(replaced)
        return engine, replaced

    def attached(self, instance_id: str) -> bool:
        """Whether this engine process has an attachment."""
        return instance_id in self._by_instance

    def find(self, instance_id: str) -> Engine | None:
        """Return the attachment of this engine process, or None."""
        return self._by_instance.get(instance_id)

    def detach(self, engine: Engine) -> bool:
        """Remove this attachment. False if it was removed or replaced before."""
        if self._by_instance.get(engine.instance_id) is not engine:
            return False
        del self._by_instance[engine.instance_id]
        self._breakers.give_back(engine.name, engine.breaker, engine.last_heard)
        self._depart(engine)
        return True

    def expired(self, now: float) -> list[Engine]:
        """Return the engines whose lease ran out by monotonic time `now`."""
        return [engine for engine in self if now - engine.last_heard > self._lease_s]

    def conflict(self, model: common_pb2.ModelInfo, instance_id: str) -> str | None:
        """Return why engine `instance_id` cannot serve `model` with the others of that name, or None."""
        for engine in self:
            if engine.instance_id == instance_id or engine.model.name != model.name:
                continue
            if _vocabulary(engine.model) != _vocabulary(model):
                return "Another engine serves this model name with a different vocabulary or tokenizer."
            if _purpose(engine.model) != _purpose(model):
                return "Another engine serves this model name for other tasks or other vectors."
        return None

    def knows(self, model: str) -> bool:
        """Whether the model was attached here, and not so long ago that it is forgotten."""
        return model in self._models

    def named(self, name: str) -> list[Engine]:
        """Return the attached engines with this instance id or engine name."""
        return [engine for engine in self if name in (engine.instance_id, engine.name)]

    def columns(self, model: str) -> EngineColumns:
        """Return the engines of `model`, up to date: the same object until one of them joins or leaves."""
        columns = self._columns.get(model)
        if columns is None:
            columns = EngineColumns([engine for engine in self if engine.model.name == model])
            if len(columns):
                self._columns[model] = columns
        while self._stale:
            engine = self._stale.pop()
            if (home := self._columns.get(engine.model.name)) is not None:
                home.refresh(engine)
        return columns

    def candidates(
        self,
        model: str,
        *,
        excluding: Collection[Engine] = (),
        role: engine_pb2.EngineRole.ValueType | None = None,
    ) -> list[Engine]:
        """Return the engines that may be given a sequence of `model` now; see EngineColumns.open_to."""
        columns = self.columns(model)
        return [columns.engines[row] for row in np.flatnonzero(columns.open_to(role, excluding))]

    def served_models(self) -> list[router_pb2.ServedModel]:
        """Return all known models with their serving engines and loads, in the order of first attachment."""
        served = {
            name: router_pb2.ServedModel(info=known.info, created=known.created, load=router_pb2.ModelLoad())
            for name, known in self._models.items()
        }
        lengths: dict[str, int] = {}
        for_prompts: dict[str, int] = {}
        for engine in self:
            name = engine.model.name
            _add_engine(served[name], engine)
            if engine.serving and not engine.does(None):
                for_prompts[name] = for_prompts.get(name, 0) + 1
            # A sequence may land on any of them, so the shortest context is what the model offers.
            lengths[name] = min(lengths.get(name, engine.model.max_model_len), engine.model.max_model_len)
            served[name].info.max_model_len = lengths[name]
        for name, count in for_prompts.items():
            # They compute all of a sequence where there are no others.
            served[name].serving_engines = served[name].serving_engines or count
        return list(served.values())

    def _remember(self, engine: Engine, created: int) -> None:
        name = engine.model.name
        self._departed.pop(name, None)
        known = self._models.get(name)
        if known is None:
            self._models[name] = KnownModel(engine.model, created)
        elif not any(other.model.name == name and other is not engine for other in self):
            known.info = engine.model

    def _depart(self, engine: Engine) -> None:
        engine.stale = None
        self._stale.discard(engine)
        name = engine.model.name
        self._columns.pop(name, None)
        if name not in self._models or any(other.model.name == name for other in self):
            return
        self._departed[name] = None
        if len(self._departed) > MAX_DEPARTED_MODELS:
            oldest = next(iter(self._departed))
            del self._departed[oldest], self._models[oldest]


def _add_engine(model: router_pb2.ServedModel, engine: Engine) -> None:
    model.serving_engines += engine.serving and engine.does(None)
    report = engine.report
    if report is None:
        model.load.total_blocks += engine.capacity.total_blocks
        return
    # These are narrower than a sum over many engines may be.
    model.load.running = min(model.load.running + report.running, UINT32_MAX)
    model.load.waiting = min(model.load.waiting + report.waiting, UINT32_MAX)
    model.load.used_blocks += report.used_blocks
    model.load.total_blocks += report.total_blocks


def _purpose(
    model: common_pb2.ModelInfo,
) -> tuple[frozenset[int], int, frozenset[int], bool, tuple[str, ...]]:
    tasks = frozenset(model.tasks) or frozenset({common_pb2.MODEL_TASK_GENERATE})
    widths = frozenset(model.embedding_dimensions)
    return tasks, model.embedding_width, widths, model.any_dimensions, tuple(model.labels)


def _vocabulary(model: common_pb2.ModelInfo) -> tuple[int, str]:
    return model.vocab_size, model.tokenizer_sha256
