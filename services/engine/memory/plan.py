"""How much of a device's memory goes to activations, graphs and KV blocks. Pure numbers.

The arithmetic of Gaudi users: gpu_memory_utilization scales what is FREE once the weights are loaded and the
largest forward has its activations, not the whole device; graph_reserved_mem is a share of that; the rest is
KV. The padding block is not part of the KV: it lies in what the utilization leaves free.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.bucketing import Bucket

GIB = 2**30


class InsufficientMemory(Exception):
    """The model or the KV pool does not fit the device. One line with the numbers and what to change."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The size of the KV pool and the longest sequence that the engine serves with it."""

    num_blocks: int
    max_model_len: int


def plan_kv(
    *,
    budget_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_num_seqs: int,
    model_limit: int,
    max_model_len: int | None,
    spare: bool = False,
) -> KvPlan:
    """Divide the budget into blocks. The padding block is not among them and not paid from the budget.

    `max_model_len` None means the model's limit, or less if the budget does not hold that. `spare`: take all
    of the budget, more than `max_num_seqs` sequences of maximum length could use, so that the rest keeps
    prefixes. Raises InsufficientMemory if the length asked for does not fit, or none does.
    """
    block_bytes = bytes_per_token * block_size
    fitting = max(0, budget_bytes) // block_bytes
    wanted = max_model_len if max_model_len is not None else min(model_limit, fitting * block_size)
    blocks_each = -(-wanted // block_size)
    if blocks_each > fitting or wanted < 2:
        length = max_model_len or model_limit
        needed = -(-length // block_size) * block_bytes
        raise InsufficientMemory(
            f"a sequence of max-model-len {length} needs {needed / GIB:.2f} GiB of KV cache and "
            f"{max(0, budget_bytes) / GIB:.2f} GiB are there for it, enough for "
            f"{fitting * block_size} tokens: lower max-model-len or raise kv-cache-gib"
        )
    used = blocks_each * max_num_seqs
    return KvPlan(num_blocks=fitting if spare else min(fitting, used), max_model_len=wanted)


# Hidden states of a layer that are alive at once: residual, normed input, query, key, value, output, and the
# two halves of the gated MLP, which are several times wider.
_LIVE_STATES = 16
_SCORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Figures of a model. kv_bytes_per_token: of the widest layer; item_size: bytes of its dtype."""

    hidden_size: int
    vocab_size: int
    heads: int
    kv_bytes_per_token: int
    item_size: int


def estimate_activations(
    model: ModelFigures, prefill: Bucket, decode: Bucket, *, block_size: int, rows: int
) -> int:
    """Estimate bytes of the larger of two forwards, and of scoring `rows` tokens, from above.

    A layer's cached context is gathered (and once more expanded for the batch); scores are float32. Prefill
    attention works in slices, so that its scores are those of one query block.
    """
    head = rows * (model.hidden_size * model.item_size + 2 * model.vocab_size * _SCORE_BYTES)
    context = prefill.batch * (prefill.context_blocks * block_size + prefill.query)
    tokens = prefill.batch * prefill.query
    mask = tokens * (prefill.context_blocks * block_size + prefill.query)
    states = tokens * model.hidden_size * model.item_size * _LIVE_STATES
    first = states + 2 * context * model.kv_bytes_per_token + mask
    cached = decode.context_blocks * block_size
    states = decode.batch * model.hidden_size * model.item_size * _LIVE_STATES
    second = states + cached * (2 * model.kv_bytes_per_token + 2 * model.heads * _SCORE_BYTES)
    return max(first, second) + head


def estimate_profile(
    *, tokens: int, rows: int, mlp_width: int, hidden: int, vocab: int, item_size: int, gated: bool = True
) -> int:
    """Return measured bytes of a run of `tokens` prompt tokens in `rows` prompts, without weights and KV.

    A layer is widest in its MLP: gate and up, which are one product, and their product, are alive together
    (without a gate: before and after the activation). The head takes the last token of each prompt, in
    float32. A published profile run of Llama 3.1 8B, 4 prompts of 1,024 tokens, took 355 MiB; this gives 340.
    mlp_width: of all the experts that a token passes together.
    """
    widest = tokens * mlp_width * item_size * (3 if gated else 2)
    return widest + rows * (hidden * item_size + 2 * vocab * _SCORE_BYTES)


@dataclass(frozen=True, slots=True)
class GraphReserve:
    """Memory set aside for graphs: `share` of the usable memory until a run has measured them.

    `measured` is what the last run with the same shapes needed, in bytes. Devices without graphs have
    neither.
    """

    share: float = 0.0
    measured: int | None = None

    # Captures of the same shapes do not take exactly the same memory twice.
    HEADROOM = 1.1

    def bytes_of(self, usable: int) -> int:
        """The reserve; a measurement counts up to half of the usable memory."""
        if self.measured is None:
            return int(usable * self.share)
        return min(int(self.measured * self.HEADROOM), usable // 2)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes. free = activations + available; usable = graphs + kv + what a limit leaves unused.

    `free`: with the weights loaded; `activations`: of the largest forward.
    """

    total: int
    weights: int
    free: int
    utilization: float
    activations: int
    graphs: int
    graphs_measured: bool
    kv: int

    @property
    def available(self) -> int:
        """Bytes left after weights and activations: the free device memory of vLLM's log."""
        return max(0, self.free - self.activations)

    @property
    def usable(self) -> int:
        """The part of `available` for graphs and KV, in bytes."""
        return int(self.available * self.utilization)


def plan_memory(
    *,
    total: int,
    weights: int,
    free: int,
    utilization: float,
    activations: int,
    reserve: GraphReserve,
    padding: int = 0,
    kv_bytes: int | None = None,
    kv_limit: int | None = None,
) -> MemoryPlan:
    """Divide `free`, the bytes that are free once the weights are loaded.

    padding: bytes of the padding block; kv_bytes: the operator's size for KV, which may take what the
    utilization would leave free; kv_limit: no more than this unless the operator says so. The result's `kv`
    may be zero or negative: `plan_kv` refuses it with the length that does not fit. Raises InsufficientMemory
    if `kv_bytes` does not fit.
    """
    usable = int(max(0, free - activations) * utilization)
    graphs = reserve.bytes_of(usable)
    # A utilization of 1 leaves nothing for the padding block.
    room = free - activations - graphs - padding
    rest = min(usable - graphs, room)
    if kv_bytes is None:
        kv = rest if kv_limit is None else min(rest, kv_limit)
    else:
        kv = kv_bytes
        if kv > room:
            raise InsufficientMemory(
                f"kv-cache-gib {kv / GIB:g} exceeds the memory that is free: {free / GIB:.2f} GiB, of which "
                f"activations take {activations / GIB:.2f} GiB, graphs {graphs / GIB:.2f} GiB and the "
                f"padding block {padding / GIB:.2f} GiB: lower it"
            )
    return MemoryPlan(
        total, weights, free, utilization, activations, graphs, reserve.measured is not None, kv
    )


log = get_logger(__name__)


def history_key(**facts: object) -> str:
    """A name for everything that decides what graphs take: model, dtype, device, limits, versions."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class GraphHistory:
    """One small file per key below the cache directory."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self._path = cache_dir / "graphs" / f"{key}.json"

    def read(self) -> int | None:
        """Return bytes of the last run's graphs; None if there was none or its file is damaged."""
        try:
            value = json.loads(self._path.read_text())["graph_bytes"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("a damaged measurement of graph memory is ignored", file=str(self._path))
            return None
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def write(self, graph_bytes: int) -> None:
        """Keep the measurement. A directory that cannot be written costs the next start its knowledge."""
        partial = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"graph_bytes": graph_bytes}))
            partial.replace(self._path)
        except OSError as error:
            log.warning("the measurement of graph memory is not kept", reason=str(error))


_MIB = 2**20


def memory_table(plan: MemoryPlan, kv: KvPlan, *, block_bytes: int, activations_measured: bool) -> list[str]:
    """One line per use."""
    pool = kv.num_blocks * block_bytes
    rows = [
        ("device", plan.total, ""),
        ("weights", plan.weights, ""),
        ("free with weights loaded", plan.free, ""),
        ("activations", plan.activations, "measured" if activations_measured else "estimated"),
        ("usable", plan.usable, f"gpu-memory-utilization {plan.utilization:g}"),
        ("graphs", plan.graphs, "measured by the last run" if plan.graphs_measured else "reserved"),
        ("KV padding block", block_bytes, ""),
        ("KV cache", pool, f"{kv.num_blocks} blocks, sequences of up to {kv.max_model_len} tokens"),
    ]
    return [
        f"{name:<26}{_size(size)}  {note}".rstrip() for name, size, note in rows if size or name != "graphs"
    ]


def _size(count: int) -> str:
    value, unit = (count / GIB, "GiB") if abs(count) >= GIB // 10 else (count / _MIB, "MiB")
    return f"{value:>9.2f} {unit}"
