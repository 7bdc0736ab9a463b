"""One rank of the bandwidth test: `python -m catenary_apps.doctor.hccl_rank --mib 256`, started by hccl.py.

The only module of the command that needs torch and the vendor's bridge.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from typing import Any

_WARM_UP = 5
_REPEATS = 20


def measure(mib: int) -> float:
    """Return seconds of one all-reduce of a bfloat16 tensor of so many MiB, the mean of some in a row."""
    torch: Any = importlib.import_module("torch")
    # Registers the device, then the backend.
    hpu: Any = importlib.import_module("habana_frameworks.torch.hpu")
    importlib.import_module("habana_frameworks.torch.distributed.hccl")
    distributed = torch.distributed
    distributed.init_process_group("hccl")
    try:
        tensor = torch.ones(mib * 2**19, dtype=torch.bfloat16, device="hpu")
        distributed.all_reduce(tensor)
        if float(tensor[0].cpu()) != distributed.get_world_size():
            raise RuntimeError("the all-reduce gave a wrong sum")
        for _ in range(_WARM_UP):
            distributed.all_reduce(tensor)
        hpu.synchronize()
        start = time.perf_counter()
        for _ in range(_REPEATS):
            distributed.all_reduce(tensor)
        hpu.synchronize()
        return (time.perf_counter() - start) / _REPEATS
    finally:
        distributed.destroy_process_group()


def main() -> int:
    """Print the result as the last line of stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, required=True)
    options = parser.parse_args()
    seconds = measure(options.mib)
    print(json.dumps({"seconds": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
