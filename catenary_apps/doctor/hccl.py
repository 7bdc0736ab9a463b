"""An all-reduce between all cards, measured: the one check that uses them."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from catenary.runtime import module_command
from catenary_apps.doctor.host import Survey
from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning

RANK_COMMAND = module_command("catenary_apps.doctor.hccl_rank")

# What the links from a card to one other of its server carry, in GB/s one way: three ports of 100 Gb/s, or
# of 200.
_PEER_GB_S = {"HL-225": 37.5, "HL-325": 75.0}
# Below this share of it something is wrong; a good server gets 80 % and more with large tensors.
_LEAST_SHARE = 0.5
_POLL_S = 0.1
_TAIL_BYTES = 4000
_MOST_SAID = 300


@dataclass(frozen=True, slots=True)
class BandwidthOptions:
    """Size of the tensor, and how long it may take in all."""

    mib: int = 256
    seconds: float = 180.0
    command: Sequence[str] = RANK_COMMAND


def has_bridge() -> bool:
    """Return whether the vendor's torch bridge is installed, without importing it."""
    return importlib.util.find_spec("habana_frameworks") is not None


def check_bandwidth(survey: Survey, options: BandwidthOptions, *, bridge: bool) -> Result:
    """Run one rank on each card, unless something stands in the way: the result then says what."""
    cards = survey.cards
    modules = [card.module_id for card in cards if card.module_id is not None]
    if len(cards) < 2:
        return not_applicable("it takes two cards or more")
    if not bridge:
        return not_applicable("it takes habana_frameworks: run catenary doctor in the image for hpu")
    if survey.busy:
        return not_applicable("processes hold cards: measured only when nobody does")
    if len(modules) < len(cards):
        return not_applicable("module ids are unknown")
    try:
        seconds = _measure(sorted(modules), options)
    except BandwidthError as error:
        return problem(
            f"the all-reduce of {len(cards)} cards failed: {error}",
            "look at the card owners and the NIC ports above; HCCL_SOCKET_IFNAME=lo if the host's name leads "
            "nowhere",
        )
    return _judge(survey, options.mib, seconds)


class BandwidthError(Exception):
    """The test did not run to its end; the text is one line."""


def _measure(modules: Sequence[int], options: BandwidthOptions) -> float:
    """Return seconds of one all-reduce, of the slowest rank. Raises BandwidthError."""
    port = _free_port()
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="catenary-doctor-") as directory, ExitStack() as stack:
        ranks = [_Rank(n, modules, port, options, Path(directory)) for n in range(len(modules))]
        for rank in ranks:
            stack.callback(rank.end)
        while True:
            codes = [rank.process.poll() for rank in ranks]
            for rank, code in zip(ranks, codes, strict=True):
                if code:
                    raise BandwidthError(rank.last_words())
            if None not in codes:
                return max(rank.seconds() for rank in ranks)
            if time.monotonic() > deadline:
                raise BandwidthError(f"not done in {options.seconds:.0f} s")
            time.sleep(_POLL_S)


class _Rank:
    """The process of one rank. It writes to files: the vendor's libraries say more than a pipe holds."""

    def __init__(
        self, rank: int, modules: Sequence[int], port: int, options: BandwidthOptions, directory: Path
    ) -> None:
        self._module = modules[rank]
        self._output = directory / f"{rank}.out"
        self._errors = directory / f"{rank}.err"
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(modules)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # Read when the process first touches a card.
            "HLS_MODULE_ID": str(self._module),
            # The operator's shell may have chosen lazy mode for engines.
            "PT_HPU_LAZY_MODE": "0",
        }
        command = [*options.command, "--mib", str(options.mib)]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
            )

    def last_words(self) -> str:
        """Return why it failed, as far as it said."""
        lines = _tail(self._errors).split("\n")
        code = f"exit code {self.process.returncode}"
        said = next((line.strip() for line in reversed(lines) if line.strip()), code)
        return f"module {self._module}: {said[:_MOST_SAID]}"

    def seconds(self) -> float:
        """Return the result, from the last line. Raises BandwidthError if there is none."""
        try:
            return float(json.loads(_tail(self._output).strip().split("\n")[-1])["seconds"])
        except (ValueError, KeyError, TypeError):
            raise BandwidthError(f"module {self._module} ended without a result") from None

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def _judge(survey: Survey, mib: int, seconds: float) -> Result:
    count = len(survey.cards)
    # Each card sends and receives this much of the tensor, whatever the algorithm (as nccl-tests count it).
    reached = 2 * (count - 1) / count * mib * 2**20 / seconds / 1e9
    found = f"all-reduce of {mib} MiB between {count} cards: {reached:.1f} GB/s each"
    kind = survey.smi.cards[0].name[:6] if survey.smi and survey.smi.cards else ""
    if kind not in _PEER_GB_S:
        return ok(found)
    most = _PEER_GB_S[kind] * (count - 1)
    if reached < _LEAST_SHARE * most:
        return warning(
            f"{found}, of {most:.0f} that the links carry",
            "see the NIC ports above; the governor and NUMA balancing cost too; then the vendor's hl_qual",
        )
    return ok(f"{found}, {reached / most:.0%} of what the links carry")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
