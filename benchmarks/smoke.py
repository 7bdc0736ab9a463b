"""Whether this tree is as fast as what was recorded: Catenary alone, few runs, ratios to a file of figures.

Run: `make bench-smoke`, or `python -m benchmarks.smoke`; `--record` writes the file anew. It takes two
minutes at the most and fails only if nothing could be measured: figures of a machine that does other things
beside are no proof of anything, and those of another kind of machine are named as such.

`--against REV` measures this tree and a revision in turn on this machine (see benchmarks/against.py), and
fails if a figure has become worse.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import against
from benchmarks.peers import (
    DEFAULT_DIRECTORY,
    FIRST_TOKEN,
    OWN,
    Lengths,
    Measuring,
    PeerError,
    cell,
    machine,
    open_servers,
    same_kind,
    table,
)
from services.engine.model.checks import ModelError

RECORDED = Path(__file__).with_name("smoke.json")
STREAMS = (1, 8)
_LENGTHS = Lengths(prompt_tokens=64, output_tokens=64, words=400, prompts=2)
_REPEATS = 2
_TIMEOUT_S = 60.0
# Names of the figures, and whether more is better.
_START, _TTFT = "start, s", "first token of 400 words, ms"
_RATES = {count: f"{count} stream{'s' if count > 1 else ''}, tokens/s" for count in STREAMS}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write what is measured to {RECORDED.name}")
    parser.add_argument("--against", metavar="REV", help="measure this tree and a revision in turn")
    parser.add_argument("--repeats", type=int, default=5, help="of --against")
    parser.add_argument(
        "--part", action="append", choices=against.PARTS, help="of --against, can be repeated; default: all"
    )
    options = parser.parse_args()
    found = machine()
    try:
        if options.against is not None:
            return against.run(options.against, options.repeats, options.part or against.PARTS, _tell)
        figures = _measure()
    except (PeerError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.record:
        recorded = {"date": datetime.now(UTC).date().isoformat(), "machine": found, "figures": figures}
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    print("\n".join(compared(figures, recorded, found)))
    return 0


def compared(
    figures: Mapping[str, float], recorded: Mapping[str, Any], found: Mapping[str, Any]
) -> list[str]:
    """Return lines of the table: what is, what was, and how many times as good it is now."""
    then = recorded["machine"]
    lines = [
        f"recorded {recorded['date']} at commit {then['commit']} on {then['cpu']}, {then['cores']} cores"
    ]
    if not same_kind(dict(found), dict(then)):
        lines.append(f"this is another machine ({found['cpu']}, {found['cores']} cores): ratios say little")
    if found["load_before"][0] > 0.3 * found["cores"]:
        lines.append(f"the load of this machine was {found['load_before'][0]}: figures have suffered")
    rows = [["", "now", "recorded", "times as good"]]
    for name, now in figures.items():
        before = recorded["figures"].get(name)
        if before is None:
            rows.append([name, f"{now:g}", "-", "-"])
            continue
        better = now / before if name in _RATES.values() else before / now
        rows.append([name, f"{now:g}", f"{before:g}", f"{better:.2f}"])
    return [*lines, "", *table(rows)]


def _measure() -> dict[str, float]:
    threads = len(os.sched_getaffinity(0))
    with open_servers([OWN], "smollm2", DEFAULT_DIRECTORY, threads, _TIMEOUT_S, _tell) as opened:
        measuring = Measuring(opened.servers, opened.model.directory, _LENGTHS)
        measuring.warm_up(STREAMS, _tell)
        samples = measuring.all_runs(STREAMS, _REPEATS, _tell)
    figures = {_START: round(opened.starts[OWN], 1)}
    for count, name in (*_RATES.items(), (FIRST_TOKEN, _TTFT)):
        value = cell(samples, OWN, count)
        if value is not None:
            figures[name] = round(value.median, 1)
    return figures


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
