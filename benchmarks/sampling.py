"""What a step's sampling costs: milliseconds a call, by batch and by what the rows ask for.

python -m benchmarks.sampling --threads 2
python -m benchmarks.sampling --static    as on a device of static shapes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from services.engine.device import Device
from services.engine.device.cpu import CpuDevice
from services.engine.domain import SamplingOptions
from services.engine.runner.batches import static_counts
from services.engine.sampling import (
    Counts,
    ExactStages,
    Program,
    RowParams,
    SamplingCalls,
    SequenceState,
    StaticSizes,
    StaticStages,
    allocate,
)

HISTORY = 512

CASES = {
    "greedy": SamplingOptions(temperature=0.0),
    "temperature": SamplingOptions(temperature=0.8),
    "temperature, top_p": SamplingOptions(temperature=0.8, top_p=0.95),
    "temperature, top_p, top_k": SamplingOptions(temperature=0.8, top_p=0.95, top_k=40),
    "wide nucleus": SamplingOptions(temperature=3.0, top_p=0.95),
    "greedy, penalties": SamplingOptions(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1),
    "greedy, bias": SamplingOptions(temperature=0.0, logit_bias=tuple((i, 1.0) for i in range(64))),
    "greedy, 5 logprobs": SamplingOptions(temperature=0.0, top_logprobs=5),
}


def timed(call: Callable[[], object], repeats: int) -> float:
    """Least milliseconds of a call: what it costs when nothing else wants the processor."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[2:]) * 1000


def measure(
    options: SamplingOptions, batch: int, vocab: int, repeats: int, device: Device, *, static: bool
) -> tuple[float, float]:
    """Milliseconds of the device's pass, and of the host's preparation of it."""
    generator = torch.Generator().manual_seed(batch)
    # As of a trained model: the probability falls with a power of the rank.
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(batch)])
    logits = ranks.add(1).float().log().mul(-1.5) + torch.randn(batch, vocab, generator=generator) / 4
    last_tokens = torch.zeros(batch + 1, dtype=torch.int64)
    histories = torch.randint(vocab, (batch, HISTORY), generator=generator).tolist()
    states = [SequenceState(options, history, HISTORY // 2) for history in histories]
    rows = [RowParams(state, HISTORY, pending_row=0) for state in states]
    make = static_sampler if static else exact_sampler
    program, run = make(logits, last_tokens, device)
    last_rows = list(range(batch))
    calls = program.sampling(rows, last_rows)
    device_ms = timed(lambda: run(calls), repeats)
    return device_ms, timed(lambda: program.sampling(rows, last_rows), repeats)


Sampler = tuple[Program, Callable[[SamplingCalls], object]]


def exact_sampler(logits: torch.Tensor, last_tokens: torch.Tensor, device: Device) -> Sampler:
    """Samples logits [R, V] that are given: a head costs nothing."""
    counts = Counts.powers(static_counts(logits.shape[0]), logits.shape[1])

    def run(made: SamplingCalls) -> torch.Tensor:
        stages = ExactStages(lambda hidden: hidden, logits, last_tokens, device)
        for call in (*made.scores, *made.tokens):
            stages.run(call)
        return stages.packed()

    return Program(device, logits.shape[1], counts, 1, 0), run


def static_sampler(logits: torch.Tensor, last_tokens: torch.Tensor, device: Device) -> Sampler:
    """The same where shapes are static."""
    batch, vocab = logits.shape
    program = Program(device, vocab, Counts.static(static_counts(batch), vocab), 1, 1)
    buffers = allocate(device, StaticSizes(batch, 1, 1, 1), vocab, vocab, torch.float32)
    stages = StaticStages(lambda hidden: hidden, logits, last_tokens, buffers, device)

    def run(made: SamplingCalls) -> None:
        for call in (*made.scores, *made.tokens, program.result(1, buffers.harmless)):
            stages.forward(call)(*call.tensors)

    return program, run


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--static", action="store_true", help="the computations of few static shapes")
    args = parser.parse_args()
    device = CpuDevice(args.threads)
    print(f"{'ms a call (host preparation)':30}" + "".join(f"{f'B={batch}':>18}" for batch in args.batches))
    for name, options in CASES.items():
        figures = [
            measure(options, batch, args.vocab, args.repeats, device, static=args.static)
            for batch in args.batches
        ]
        print(f"{name:30}" + "".join(f"{f'{ms:.2f} ({host:.2f})':>18}" for ms, host in figures))


if __name__ == "__main__":
    main()
