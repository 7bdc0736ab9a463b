"""Prepare a model ahead of the services that need its directory: the tokenizer and the engine.

`python -m services.engine.model.prepare --model X [--cache-dir D] [--convert-timeout-s N]` prints the
directory as its last line on stdout and its progress on stderr. It imports neither torch nor transformers:
with everything in place it takes milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from services.engine.model.checks import ModelError, UnknownModelError
from services.engine.model.preparation import prepare_model


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 0 with the directory on stdout, or one line on stderr with 2 if the model
    option names nothing, 1 if the model cannot be prepared."""
    parser = argparse.ArgumentParser(prog="python -m services.engine.model.prepare", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="alias (smollm2, minilm), .gguf file, directory or hub id"
    )
    parser.add_argument("--cache-dir", type=Path, default=None, help="cache for converted models")
    parser.add_argument(
        "--convert-timeout-s", type=float, default=None, help="seconds that converting a file may take"
    )
    options = parser.parse_args(argv)
    try:
        directory = prepare_model(
            options.model,
            cache_dir=options.cache_dir,
            progress=lambda line: _write(sys.stderr, line),
            convert_s=options.convert_timeout_s,
        )
    except ModelError as error:
        _write(sys.stderr, f"error: {error}")
        return 2 if isinstance(error, UnknownModelError) else 1
    _write(sys.stdout, str(directory))
    return 0


def _write(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
