"""All linear layers of a small decoder, once through: the native kernels beside torch's.

Milliseconds for 30 layers and the head of SmolLM2-135M, weights from memory, and in brackets the TFLOP/s that
they come to: the best of many runs, since whatever else runs on the machine only adds. torch's own run in
float32 and in bfloat16, the latter with weights that oneDNN has packed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from services.engine.device.cpu.native import open_library
from services.engine.device.cpu.native.products import Kind, Products

# Outputs and inputs of a layer's products; gate and up are one.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49_152, 576)
LAYERS = 30
PARAMETERS = LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES) + HEAD[0] * HEAD[1]


def best_ms(run: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def weights() -> list[torch.Tensor]:
    return [torch.randn(outputs, inputs) * 0.03 for _ in range(LAYERS) for outputs, inputs in SHAPES] + [
        torch.randn(*HEAD) * 0.03
    ]


def native_run(
    products: Products, kind: Kind, all_weights: list[torch.Tensor], x: torch.Tensor
) -> Callable[[], None]:
    layers = [products.pack(kind, weight) for weight in all_weights]
    outs = {layer.outputs: torch.empty(x.shape[0], layer.outputs) for layer in layers}
    prepared = products.prepare(layers, x, [outs[layer.outputs] for layer in layers])
    # It holds what the run reads, but for the weights.
    return lambda: (prepared.run(), layers)[0]


def torch_run(dtype: torch.dtype, all_weights: list[torch.Tensor], x: torch.Tensor) -> Callable[[], None]:
    rows = {inputs: x[:, :inputs].to(dtype).contiguous() for inputs in (576, 1536)}
    if dtype is torch.float32:
        return lambda: [torch.nn.functional.linear(rows[w.shape[1]], w) for w in all_weights]
    packed = [(torch.ops.mkldnn._reorder_linear_weight(w.to(dtype)), w.shape[1]) for w in all_weights]
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda: [linear(rows[inputs], weight, None, "none", [], "") for weight, inputs in packed]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products = Products(open_library(), options.threads)
    all_weights = weights()
    print("| rows | " + " | ".join(f"{rows}" for rows in options.rows) + " |")
    print("| --- |" + " --- |" * len(options.rows))

    def show(name: str, make: Callable[[torch.Tensor], Callable[[], object]]) -> None:
        cells = []
        for rows in options.rows:
            run = make(torch.randn(rows, 1536))
            ms = best_ms(run, options.seconds)
            # The head is computed for all rows here: few rows of a prompt need it.
            cells.append(f"{ms:.2f} ({2 * PARAMETERS * rows / ms * 1e-9:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)

    for name in options.kinds:
        kind = Kind[name.upper()]
        show(f"native {name}", lambda x, kind=kind: native_run(products, kind, all_weights, x))
    if not options.no_torch:
        show("torch float32", lambda x: torch_run(torch.float32, all_weights, x))
        show("torch bfloat16, packed", lambda x: torch_run(torch.bfloat16, all_weights, x))


if __name__ == "__main__":
    main()
