"""The interface of a placement policy, and the table of all policies."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, TypeVar

from services.router.placement.candidates import Candidates, Choice
from services.router.placement.options import PlacementOptions
from services.router.placement.request import PlacementRequest


class Memory(Enum):
    """Of which engines a policy wants remembered what they were sent."""

    NONE = "none"
    # Of those that do not tell what they have cached.
    UNTOLD = "untold"
    ALL = "all"


class PlacementPolicy(ABC):
    """Chooses an engine for a sequence.

    A policy is asked on the event loop for every sequence: it neither blocks nor keeps anything that grows
    without a bound. Load is counted by others; a policy only reads it. Its randomness is the caller's, and
    its time is that of the candidates, so that a simulation can be repeated.
    """

    name: ClassVar[str]
    memory: ClassVar[Memory] = Memory.NONE

    def __init__(self, rng: random.Random, options: PlacementOptions | None = None) -> None:
        self._rng = rng
        self._options = options or PlacementOptions()

    @abstractmethod
    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """Choose among the candidates, of which there is at least one."""


POLICIES: dict[str, type[PlacementPolicy]] = {}

_Policy = TypeVar("_Policy", bound=type[PlacementPolicy])


def register(name: str) -> Callable[[_Policy], _Policy]:
    """Class decorator: make a policy available under the name that the option `placement` takes."""

    def add(policy: _Policy) -> _Policy:
        policy.name = name
        POLICIES[name] = policy
        return policy

    return add


def policy_named(name: str, rng: random.Random, options: PlacementOptions | None = None) -> PlacementPolicy:
    """The policy registered as `name`. Raises KeyError for an unknown one."""
    return POLICIES[name](rng, options)
