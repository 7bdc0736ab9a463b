"""What a placement policy is, and the table of those there are."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.router.fleet import Engine


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a policy may look at. `sequences`: as how many it counts.

    `beside`: the engine that has the same prompt, if one has. The placer prefers that one if it can take the
    request, and does not ask the policy then.
    """

    request_id: str
    model: str
    token_count: int
    beside: Engine | None = None
    sequences: int = 1


class PlacementPolicy(ABC):
    """Chooses an engine for a sequence.

    A policy is asked on the event loop for every sequence: it neither blocks nor keeps anything that grows
    with the number of requests. Load is counted by the caller; a policy only reads it.
    """

    @abstractmethod
    def pick(self, request: PlacementRequest, engines: Sequence[Engine]) -> Engine | None:
        """Choose among `engines`, which all serve the model and have room. None only if there are none."""


POLICIES: dict[str, Callable[[random.Random], PlacementPolicy]] = {}


def register(
    name: str,
) -> Callable[[Callable[[random.Random], PlacementPolicy]], Callable[[random.Random], PlacementPolicy]]:
    """Class decorator: make a policy available under the name that the option `placement` takes."""

    def add(
        factory: Callable[[random.Random], PlacementPolicy],
    ) -> Callable[[random.Random], PlacementPolicy]:
        POLICIES[name] = factory
        return factory

    return add


def policy_named(name: str, rng: random.Random) -> PlacementPolicy:
    """The policy registered as `name`. Raises KeyError for an unknown one."""
    return POLICIES[name](rng)
