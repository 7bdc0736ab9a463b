"""Engine cores on a simulated HPU, small enough that a test can start several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.engine.device import ExecutionMode, sim
from services.engine.domain import FinishReason
from tests.support.sim_device import EAGER, Host
from tests.support.torch_engine import LocalCore, Output, tiny_options

# A dozen buckets: prompts go in chunks and with neighbours, and decodes of two sizes.
SIZES: dict[str, Any] = {
    "max_model_len": 96,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_prefill_batch": 2,
    "bucketing_strategy": "linear",
    "bucket_prefill_batch": "min=1,step=1,max=2",
    "bucket_prefill_query": "min=16,step=16,max=32",
    "bucket_prefill_context": "min=0,step=6,max=6",
    "bucket_decode_batch": "min=4,step=4,max=4",
    "bucket_decode_blocks": "min=8,step=16,max=24",
    "kv_cache_gib": 0.002,
    "warmup": "full",
}


class SimCores:
    """Starts cores of one model, one after the other: each finds a new card and ends the last one's."""

    def __init__(self, host: Host, model: Path, cache: Path) -> None:
        self._host = host
        self.model = model
        self._cache = cache

    def start(
        self, mode: ExecutionMode = ExecutionMode.GRAPH, hbm_gib: float = 8.0, **options: Any
    ) -> LocalCore:
        """A core that is ready to serve. Raises StartError."""
        self.prepare(mode, hbm_gib)
        return LocalCore(self.options(**{"device": "sim", "enforce_eager": mode in EAGER, **options}))

    def prepare(self, mode: ExecutionMode, hbm_gib: float = 8.0) -> None:
        """Makes the next card one of this size, for a process of this mode."""
        self._host.prepare(mode, hbm_gib=hbm_gib)

    def cpu(self, **options: Any) -> LocalCore:
        """The same core on the CPU."""
        return LocalCore(self.options(warmup="skip", **options))

    def options(self, **options: Any) -> Any:
        """Core options of these sizes."""
        return tiny_options(self.model, **{**SIZES, "cache_dir": str(self._cache), **options})


def answer(core: LocalCore, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of one request alone."""
    key = core.submit(prompt, max_tokens=max_tokens)
    core.run()
    return whole(core.outputs[key]).token_ids


def whole(output: Output) -> Output:
    """The output of a sequence that ended at its length. Raises AssertionError for any other."""
    if output.end is None or output.end.reason is not FinishReason.LENGTH:
        raise AssertionError(f"the sequence ended with {output.end}")
    return output


def work_of(core: LocalCore) -> dict[str, int]:
    """What the card had to do anew, in counters that serving must leave as they are."""
    counters = sim.card().counters
    return {
        "compilations": counters.compilations,
        "captures": counters.captures,
        "fallbacks": counters.fallbacks,
        "first_seen": core.engine.graphs.first_seen,
    }
