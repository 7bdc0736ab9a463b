"""The rest of its key's limits that one request may use, for the code that learns its cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]


class Allowance:
    """One request's. `headers`: what its answer tells of the limits; they grow as more becomes known."""

    def __init__(
        self,
        spend: Callable[[int, Headers], Awaitable[None]] | None = None,
        charge: Callable[[int], None] | None = None,
    ) -> None:
        """`spend` counts prompt tokens or raises ApiError 429; `charge` counts what was generated."""
        self._spend = spend
        self._charge = charge
        self._spent = False
        self.headers: Headers = []

    async def spend(self, prompt_tokens: int) -> None:
        """The request's prompts have so many tokens. They count once, however often the request is tried.
        Raises ApiError: more than the key has left (429)."""
        if self._spend is not None and not self._spent:
            await self._spend(prompt_tokens, self.headers)
            self._spent = True

    def charge(self, generated_tokens: int) -> None:
        """So many were generated; they count, be it more than is left: then against the next minutes too."""
        if self._charge is not None and generated_tokens:
            self._charge(generated_tokens)


@dataclass(slots=True)
class Tried:
    """One request that is tried until it is answered, under COUNTED in its ASGI scopes. `allowance`: once it
    was counted; it costs its key's minutes no more from then on."""

    allowance: Allowance | None = None


COUNTED = "catenary.counted"

_UNLIMITED = Allowance()
_current: ContextVar[Allowance] = ContextVar("allowance", default=_UNLIMITED)


def current_allowance() -> Allowance:
    """That of the request that this task works on; without limits, one that allows everything."""
    return _current.get()


def allow(allowance: Allowance) -> None:
    """Make it the current one of this task and those that it makes."""
    _current.set(allowance)
