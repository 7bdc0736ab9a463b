"""What a step costs beside its forward, and how much of that hides behind the forward before it.

Run: `python -m benchmarks.step_overhead`. The whole core steps, with a model that returns constants. Costs
are CPU time of the loop's thread, so that neighbours on the machine do not count; waiting for the device does
not either. The overlap is wall time, with a forward that takes as long as it is told.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from services.engine.bucketing import BucketLimits, build_plan
from services.engine.config import EngineConfig
from services.engine.core.generation import GeneratingEngine, ServingRecorder
from services.engine.core.handover import Handover
from services.engine.core.loop import CoreLoop, Profiler
from services.engine.core.process import start_engine
from services.engine.device.cpu import CpuDevice
from services.engine.domain import SamplingOptions
from services.engine.graphs import Graphs
from services.engine.kv import BlockPool
from services.engine.link import (
    AbortSequences,
    BlockingLink,
    CapacityFacts,
    CoreReady,
    ModelFacts,
    SubmitSequence,
)
from services.engine.link.channel import DEFAULT_MAX_FRAME_BYTES, encode_frame
from services.engine.model.paged import DecodeInputs, LayerCache, LayerSpec, PagedModel, PrefillInputs
from services.engine.runner import KvLayout, Runner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.tracing import StepTracer

VOCAB = 512
BLOCK_SIZE = 32
MAX_LEN = 4096

CASES = {
    "greedy": SamplingOptions(temperature=0.0),
    "temperature, top_p": SamplingOptions(temperature=0.8, top_p=0.95),
    "greedy, penalties": SamplingOptions(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1),
    "greedy, 5 logprobs": SamplingOptions(temperature=0.0, top_logprobs=5),
}


class ConstantModel(PagedModel):
    """Returns constants after `seconds`: the loop's thread may work meanwhile, as beside a device."""

    backend = "constant"

    def __init__(self, device: CpuDevice, seconds: float) -> None:
        super().__init__(device)
        self.dtype = torch.float32
        self.vocab_size = VOCAB
        self.hidden_size = 8
        self.layers = (LayerSpec(1, 1, 1, None),)
        self._seconds = seconds
        self.spans: list[tuple[float, float]] = []
        """Of each decode's forward: when it began, and when it ended."""
        self._logits = torch.zeros(4096, VOCAB)
        self._logits[:, 7] = 1.0

    def weight_bytes(self) -> int:
        """Return 0: there are no weights."""
        return 0

    def compile_parts(self, *, norms_and_head: bool) -> None:
        """It has no layers."""

    def compile_whole(self) -> None:
        """It has no operations."""

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        pass

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        began = time.perf_counter()
        if self._seconds and isinstance(inputs, DecodeInputs):
            time.sleep(self._seconds)
        if isinstance(inputs, DecodeInputs):
            self.spans.append((began, time.perf_counter()))
        return torch.zeros(tokens.shape[0], self.hidden_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Token 7 is always the best."""
        return self._logits[: hidden.shape[0]]


class EncodingLink:
    """Encodes what is sent as the socket's end does, and drops it."""

    def send(self, message: Any) -> None:
        """Encode the message."""
        encode_frame(message, DEFAULT_MAX_FRAME_BYTES)

    def wake(self) -> None:
        """Do nothing: poll never waits."""

    def poll(self, timeout: float | None = 0.0) -> list[Any]:
        """Nothing comes."""
        return []


def make_core(running: int, *, overlap: bool, seconds: float = 0.0) -> CoreLoop:
    """Return a core for so many sequences of up to MAX_LEN tokens, without any yet."""
    device = CpuDevice(1)
    blocks = running * MAX_LEN // BLOCK_SIZE
    limits = BucketLimits(BLOCK_SIZE, MAX_LEN, running, 8192, blocks, 16)
    config = SchedulerConfig(MAX_LEN, running, running, 8192, 16)
    scheduler = Scheduler(
        config, BlockPool(blocks, BLOCK_SIZE, prefix_caching=True), build_plan("exponential", limits)
    )
    tracer = StepTracer()
    graphs = Graphs(device, block_size=BLOCK_SIZE, tracer=tracer)
    model = ConstantModel(device, seconds)
    runner = Runner(model, device, KvLayout(BLOCK_SIZE, blocks), graphs, max_num_seqs=running, tracer=tracer)
    facts = ModelFacts(MAX_LEN, VOCAB, [2], "float32", "")
    ready = CoreReady(facts, CapacityFacts(BLOCK_SIZE, blocks, running, running, 8192))
    engine = GeneratingEngine(
        model=model,
        scheduler=scheduler,
        runner=runner,
        graphs=graphs,
        background=None,
        device=device,
        tracer=tracer,
        profiler=Profiler(tracer, max_events=200_000, device=device.stream.profile),
        recorder=ServingRecorder(None),
        max_beam_width=0,
        async_stepping=overlap,
        ready=ready,
        code=None,
        handover=Handover(scheduler),
    )
    link: Any = EncodingLink()
    return CoreLoop(link, engine)


def fill(core: CoreLoop, running: int, options: SamplingOptions, context: int) -> None:
    """Start so many different sequences and steps until all decode."""
    for key in range(running):
        tokens = [3 + (key + index) % (VOCAB - 3) for index in range(context)]
        core.handle(
            SubmitSequence(
                key,
                tokens,
                context,
                sampling=options,
                max_tokens=MAX_LEN,
                min_tokens=0,
                stop_token_ids=[],
                ignore_eos=True,
            )
        )
    for _ in range(running * context // 8192 + running // 8 + 8):
        core.advance()


class Costs:
    """CPU time of the calling thread inside wrapped functions, milliseconds per call."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def wrap(self, name: str, owner: Any, attribute: str) -> None:
        """Measure a method of an object from now on."""
        inner: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*args, **options)
            finally:
                self.times[name].append((time.thread_time() - start) * 1000)

        setattr(owner, attribute, timed)

    def medians(self) -> Iterator[tuple[str, float, float]]:
        """Name, median and least time."""
        for name, times in self.times.items():
            yield name, statistics.median(times), min(times)


def measure_cost(running: int, context: int, steps: int) -> None:
    """Print the parts of a step's cost for each kind of row."""
    print(f"{running} running sequences of {context} tokens or more; ms per step, median (least)")
    for name, options in CASES.items():
        core: Any = make_core(running, overlap=True)
        fill(core, running, options, context)
        costs = Costs()
        costs.wrap("plan", core.work._scheduler, "plan")
        costs.wrap("prepare and launch", core.work._runner, "launch")
        costs.wrap("result and commit", core.work, "_finish")
        costs.wrap("report", core, "report")
        costs.wrap("whole turn of the loop", core, "advance")
        costs.wrap("device thread", core.work._runner.executor, "run")
        gc.collect()
        gc.freeze()
        for _ in range(steps):
            core.advance()
        print(name)
        for part, middle, least in costs.medians():
            print(f"  {part:<24}{middle:7.3f} ({least:.3f})")


def measure_overlap(running: int, context: int, steps: int, seconds: float) -> None:
    """Print the wall time of a step with and without overlap."""
    print(f"{running} greedy sequences, forward of {seconds * 1000:.0f} ms; wall ms per step")
    for overlap in (False, True):
        core = make_core(running, overlap=overlap, seconds=seconds)
        fill(core, running, CASES["greedy"], context)
        times: list[float] = []
        for _ in range(steps):
            start = time.perf_counter()
            core.advance()
            times.append((time.perf_counter() - start) * 1000)
        print(f"  overlap {'on ' if overlap else 'off'} {statistics.median(times):8.2f}")


def measure_gaps(counts: Sequence[int], steps: int, seconds: float) -> None:
    """Print how long the device waits from one forward to the next, and what a turn costs meanwhile."""
    print(f"greedy sequences, forward of {seconds * 1000:.0f} ms; ms per step")
    print("| rows | between forwards, median | p90 | CPU of the loop, median | CPU of both threads, mean |")
    print("| --- | --- | --- | --- | --- |")
    for running in counts:
        core: Any = make_core(running, overlap=True, seconds=seconds)
        fill(core, running, CASES["greedy"], 256)
        spans, turns = core.work._runner._model.spans, []
        spans.clear()
        gc.collect()
        gc.freeze()
        whole = time.process_time()
        for _ in range(steps):
            start = time.thread_time()
            core.advance()
            turns.append((time.thread_time() - start) * 1000)
        whole = (time.process_time() - whole) * 1000 / steps
        waits = [(then - done) * 1000 for (_, done), (then, _) in itertools.pairwise(spans)]
        late = statistics.quantiles(waits, n=10)[8]
        cells = (statistics.median(waits), late, statistics.median(turns), whole)
        print(f"| {running} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")


def measure_model(name: str, counts: Sequence[int], steps: int) -> None:
    """Print what a turn with a real model takes beside the model's own calls, wall time."""
    options = EngineConfig(model=name, router=("unix:none",), insecure=True, kv_cache_gib=1.0)
    engine: Any = start_engine(options, lambda activity, done: None)
    calls: list[tuple[str, float, float]] = []
    time_forwards(engine.model, calls)
    print(f"{name}, greedy; wall ms per step, medians")
    print("| rows | turn | forward with head | beside them, median | mean | CPU of the loop |")
    print("| --- | --- | --- | --- | --- | --- |")
    core: Any = CoreLoop(cast("BlockingLink", EncodingLink()), engine)
    for running in counts:
        fill(core, running, CASES["greedy"], 64)
        calls.clear()
        host, began = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            core.advance()
        turn, host = (time.perf_counter() - began) * 1000 / steps, (time.thread_time() - host) * 1000 / steps
        begins = [index for index, (kind, _, _) in enumerate(calls) if kind == "decode"]
        inside, beside = [], []
        for first, last in itertools.pairwise(begins):
            inside.append(1000 * sum(end - start for _, start, end in calls[first:last]))
            beside.append(1000 * (calls[last][1] - calls[first][1]) - inside[-1])
        forward = statistics.median(inside)
        cells = (forward, statistics.median(beside), statistics.fmean(beside), host)
        print(f"| {running} | {turn:.2f} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
        for key in range(running):
            core.handle(AbortSequences([key]))
        core.advance()
        core.advance()


def time_forwards(model: Any, calls: list[tuple[str, float, float]]) -> None:
    """Note when decodes begin and end: of a model that chooses as one, of others with the logits."""
    if model.chooser is None:
        for name in ("decode", "logits"):
            setattr(model, name, timed(name, getattr(model, name), calls))
        return
    make = model.chooser.best_step
    model.chooser.best_step = lambda *inputs: timed("decode", make(*inputs), calls)


def timed(name: str, inner: Callable[..., Any], calls: list[tuple[str, float, float]]) -> Any:
    """Return a function that notes when it is called and when it returns."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args)
        calls.append((name, start, time.perf_counter()))
        return result

    return call


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--gaps", type=int, nargs="+", help="measure only the gaps, at so many rows")
    parser.add_argument("--model", help="with --gaps: a real model instead of one that sleeps")
    options = parser.parse_args()
    if options.gaps and options.model:
        measure_model(options.model, options.gaps, options.steps)
        return
    if options.gaps:
        measure_gaps(options.gaps, options.steps, options.forward_ms / 1000)
        return
    measure_cost(options.running, options.context, options.steps)
    measure_overlap(options.running, options.context, options.steps, options.forward_ms / 1000)


if __name__ == "__main__":
    main()
