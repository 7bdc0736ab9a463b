"""All linear layers of a small decoder, once through: the native kernels beside torch's.

Milliseconds for 30 layers and the head of SmolLM2-135M, weights from memory, and in brackets the TFLOP/s that
they come to: the best of many runs, since whatever else runs on the machine only adds. torch's own run in
float32 and in bfloat16, the latter with weights that oneDNN has packed. On a busy machine `--clock cpu
--threads 1` compares what the kernels do and not what the system lets them. `--level` is for kernels of older
processors: torch's own rows are left out then.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from catenary_testing.native.products import PackedLayer, Products
from services.engine.device.cpu.native import levels_here, open_library
from services.engine.device.cpu.structures import WeightKind

# Outputs and inputs of a layer's products; gate and up are one.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49_152, 576)
MOST_INPUTS = 1536
LAYERS = 30
PARAMETERS = LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES) + HEAD[0] * HEAD[1]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

Run = Callable[[], object]
# Makes what is measured for rows float32 [rows, MOST_INPUTS].
Maker = Callable[[torch.Tensor], Run]


def best_ms(run: Run, seconds: float, clock: Callable[[], float]) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        start = clock()
        run()
        times.append(clock() - start)
    return min(times) * 1e3


def make_weights() -> list[torch.Tensor]:
    layer = [torch.randn(outputs, inputs) * 0.03 for outputs, inputs in SHAPES]
    return [weight.clone() for _ in range(LAYERS) for weight in layer] + [torch.randn(*HEAD) * 0.03]


def native(products: Products, layers: Sequence[PackedLayer]) -> Maker:
    def make(x: torch.Tensor) -> Run:
        outs = {layer.outputs: torch.empty(x.shape[0], layer.outputs) for layer in layers}
        return products.prepare(layers, x, [outs[layer.outputs] for layer in layers]).run

    return make


def torch_float32(weights: Sequence[torch.Tensor]) -> Maker:
    def make(x: torch.Tensor) -> Run:
        rows = {inputs: x[:, :inputs].contiguous() for _, inputs in SHAPES}
        return lambda: [torch.nn.functional.linear(rows[weight.shape[1]], weight) for weight in weights]

    return make


def torch_bfloat16(weights: Sequence[torch.Tensor]) -> Maker:
    pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.default
    packed = [(pack(weight.bfloat16()), weight.shape[1]) for weight in weights]

    def make(x: torch.Tensor) -> Run:
        rows = {inputs: x[:, :inputs].bfloat16().contiguous() for _, inputs in SHAPES}
        return lambda: [linear(rows[inputs], weight, None, "none", [], "") for weight, inputs in packed]

    return make


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    levels = {level.name: level for level in levels_here()}
    parser.add_argument("--level", choices=levels, help="instruction set (default: the best, and torch)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products = Products(open_library(levels.get(options.level)), options.threads)
    weights = make_weights()

    def show(name: str, make: Maker) -> None:
        cells = []
        for rows in options.rows:
            ms = best_ms(make(torch.randn(rows, MOST_INPUTS)), options.seconds, CLOCKS[options.clock])
            # The head is computed for all rows here; of a prompt one row needs it.
            cells.append(f"{ms:.2f} ({2 * PARAMETERS * rows / ms * 1e-9:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)

    print("| rows | " + " | ".join(f"{rows}" for rows in options.rows) + " |")
    print("| --- |" + " --- |" * len(options.rows))
    if options.level is None:
        show("torch float32", torch_float32(weights))
        show("torch bfloat16, packed by oneDNN", torch_bfloat16(weights))
    for kind in WeightKind:
        show(f"native {kind.name.lower()}", native(products, [products.pack(kind, w) for w in weights]))


if __name__ == "__main__":
    main()
