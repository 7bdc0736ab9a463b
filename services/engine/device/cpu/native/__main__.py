"""`python -m services.engine.device.cpu.native`: builds the kernels ahead of the engine's first start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.engine.device.cpu.native.building import (
    BuildError,
    best_level,
    build,
    kernel_directory,
    levels_of_this_architecture,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.engine.device.cpu.native", description=__doc__)
    parser.add_argument("--all", action="store_true", help="for every CPU of this architecture")
    parser.add_argument("--into", type=Path, help="directory (default: where an engine looks)")
    chosen = parser.parse_args(arguments)
    directory = chosen.into or kernel_directory(None)
    try:
        for level in levels_of_this_architecture() if chosen.all else (best_level(),):
            sys.stdout.write(f"{build(level, directory)}\n")
    except BuildError as error:
        sys.stderr.write(f"the CPU's kernels are not built, so torch's are used: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
