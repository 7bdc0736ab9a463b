"""Tests the engine's image for Gaudi on a machine without the bridge: `make compose-test` runs it.

An engine in the image says in one line what is missing, and serves on the simulated card.
"""

from __future__ import annotations

import subprocess
import sys
import time

_LIMIT_S = 120
_SIMULATED = (
    "--device=sim",
    "--enforce-eager",
    "--warmup=skip",
    "--dtype=float32",
    "--max-model-len=64",
    "--max-num-seqs=2",
    "--max-num-batched-tokens=32",
    "--block-size=32",
    "--kv-cache-gib=0.1",
)


def main(image: str) -> int:
    """Returns the exit code."""
    _expect(image, (), "services.engine: the engine did not start: ", "Habana's bridge cannot be loaded")
    _expect(image, _SIMULATED, "ENGINE_STATE_SERVING", "ENGINE_STATE_SERVING")
    return 0


def _expect(image: str, options: tuple[str, ...], line: str, part: str) -> None:
    """Starts an engine and waits until a line of its log has both texts. Ends the process if none comes."""
    command = ["docker", "run", "--detach", image, "--insecure", "--router=127.0.0.1:1", *options]
    container = _output(command).strip()
    try:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            log = _output(["docker", "logs", container])
            if any(line in each and part in each for each in log.splitlines()):
                sys.stdout.write(f"hpu image: {' '.join(options[:1]) or 'without the bridge'}: {part}\n")
                return
            time.sleep(0.5)
        sys.exit(f"hpu image: no line with {line!r} and {part!r} in {_LIMIT_S} s:\n{log}")
    finally:
        _output(["docker", "rm", "--force", container])


def _output(command: list[str]) -> str:
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return run.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
