"""Sets of CPUs as the kernel and vLLM write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CPUS = 8192
_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Binding:
    """What is asked for. `lists`: CPUs of each engine in turn; without any, `auto` says whether to choose."""

    auto: bool = False
    lists: tuple[tuple[int, ...], ...] = ()


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read `0-3,8`, rising and without doubles. Raises ValueError, one line."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < MAX_CPUS:
            raise ValueError(f"{text[:40]!r} is no set of CPUs such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """The same notation, as short as it goes."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def parse_binding(text: str) -> Binding:
    """Read `auto`, `none` or lists that | parts, one for each engine. Raises ValueError, one line."""
    word = text.strip().lower()
    if word in ("auto", "none"):
        return Binding(auto=word == "auto")
    lists = tuple(parse_cpus(part) for part in word.split("|"))
    taken = [cpu for cpus in lists for cpu in cpus]
    if len(set(taken)) < len(taken):
        raise ValueError(f"{text[:40]!r} gives one CPU to two engines")
    return Binding(lists=lists)
