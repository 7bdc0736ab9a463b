"""Makes the virtual environment of a peer, outside of the repository.

Run: `python -m benchmarks.peers.setup NAME --directory DIR`. Packages come from the index that pip is set to.
llama-cpp is compiled here, which takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.peers.environments import DEFAULT_DIRECTORY, ENVIRONMENTS, PeerError, make, program


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.setup", description=__doc__)
    parser.add_argument("name", choices=sorted(ENVIRONMENTS))
    parser.add_argument(
        "--directory", type=Path, default=DEFAULT_DIRECTORY, help="where the environments lie"
    )
    parser.add_argument("--torch-index", default="", help="package index to take torch from")
    options = parser.parse_args()
    directory = options.directory.expanduser().resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        make(options.name, directory, torch_index=options.torch_index)
        print(program(options.name, directory))
    except (PeerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
