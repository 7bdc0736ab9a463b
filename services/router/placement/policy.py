"""What a placement policy is, and the table of those there are."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from services.router.fleet import Engine
from services.router.placement.request import PlacementRequest


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer. `reason`: of the closed set in RouteReceipt.

    `scores`: what it gave to the engines that it compared, lower is better.
    """

    engine: Engine
    reason: str
    scores: Sequence[tuple[Engine, float]] = ()


class PlacementPolicy(ABC):
    """Chooses an engine for a sequence.

    A policy is asked on the event loop for every sequence: it neither blocks nor keeps anything that grows
    with the number of requests. Load is counted by the caller; a policy only reads it.
    """

    name: ClassVar[str]

    @abstractmethod
    def pick(self, request: PlacementRequest, engines: Sequence[Engine]) -> Choice | None:
        """Choose among `engines`, which all serve the model and have room. None only if there are none."""


POLICIES: dict[str, Callable[[random.Random], PlacementPolicy]] = {}


def register(name: str) -> Callable[[type[PlacementPolicy]], type[PlacementPolicy]]:
    """Class decorator: make a policy available under the name that the option `placement` takes."""

    def add(policy: type[PlacementPolicy]) -> type[PlacementPolicy]:
        policy.name = name
        POLICIES[name] = policy
        return policy

    return add


def policy_named(name: str, rng: random.Random) -> PlacementPolicy:
    """The policy registered as `name`. Raises KeyError for an unknown one."""
    return POLICIES[name](rng)
