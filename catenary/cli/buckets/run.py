"""`catenary buckets`: compares, learns, writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from catenary.cli.buckets.config import BucketsConfig
from catenary.config import load

_NAME = "catenary buckets"
_JSON = "--format=json"


def run_buckets(argv: Sequence[str]) -> int:
    """Run `catenary buckets`; 2 with one line on stderr for what cannot be done."""
    config = load(BucketsConfig, [_JSON if word == "--json" else word for word in argv], prog=_NAME)
    # Not before: a wrong option is to be refused without waiting for numpy and the engine's packages.
    from catenary.cli.buckets.compare import compare
    from catenary.cli.buckets.plot import draw
    from catenary.cli.buckets.show import as_json, as_table
    from services.engine.bucketing import format_buckets

    try:
        comparison = compare(config)
        print(as_json(comparison) if config.format == "json" else as_table(comparison))
        if config.learn is not None:
            comments = [f"learned by catenary buckets from {comparison.source}", f"for {comparison.limits}"]
            _write(config.learn, format_buckets(comparison.learned, comments).encode(), "--learn")
        if config.plot is not None:
            _write(config.plot, draw(comparison, config.plot.suffix.lower()), "--plot")
    except ValueError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    return 0


def _write(path: Path, data: bytes, option: str) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from None
