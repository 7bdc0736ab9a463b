"""`catenary buckets`: compares, learns, writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from catenary.runtime import StartRefused
from catenary_apps.buckets.config import BucketsConfig
from catenary_apps.cli.output import check_file, load_options, refused, write_file
from catenary_apps.cli.pictures import check_picture, write_picture

_NAME = "catenary buckets"


def run_buckets(argv: Sequence[str]) -> int:
    """Run `catenary buckets`; 2 with one line on stderr for what cannot be done."""
    config = load_options(BucketsConfig, argv, prog=_NAME)
    # Not before: a wrong option is to be refused without waiting for numpy and the engine's packages.
    from catenary_apps.buckets.compare import compare
    from catenary_apps.buckets.report import as_json, as_table, draw
    from services.engine.bucketing import format_buckets

    try:
        if config.learn is not None:
            check_file(config.learn, "--learn")
        if config.plot is not None:
            check_picture(config.plot, "--plot")
        comparison = compare(config, lambda line: print(f"{_NAME}: {line}", file=sys.stderr, flush=True))
        print(as_json(comparison) if config.format == "json" else as_table(comparison))
        if config.learn is not None:
            comments = [f"learned by catenary buckets from {comparison.source}", f"for {comparison.limits}"]
            write_file(config.learn, format_buckets(comparison.learned, comments).encode(), "--learn")
        if config.plot is not None:
            write_picture(config.plot, draw(comparison), "--plot")
    except (StartRefused, ValueError) as error:
        return refused(_NAME, error)
    return 0
