"""The breakers of engines that left: one that comes back under its name finds its own again."""

from __future__ import annotations

from collections import OrderedDict

from services.router.fleet.breaker import Breaker, BreakerOptions

# Names of engines that left. Only engines with the secret can attach, so this is no limit for an operator.
MAX_REMEMBERED = 1024


class Breakers:
    """Hands a breaker to each attachment.

    An instance id is new with each start, so what an engine is known by is its name: one that crashes and
    attaches again each second must not begin with a clean record. Engines that share a name each have one of
    their own.
    """

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        # Of engines that are not attached, by name, the one that left last at the end.
        self._spare: OrderedDict[str, list[Breaker]] = OrderedDict()

    def take(self, name: str, now: float) -> Breaker:
        """The breaker for an engine of this name that attaches."""
        spare = self._spare.get(name)
        if not spare:
            return Breaker(self._options)
        breaker = spare.pop()
        if not spare:
            del self._spare[name]
        breaker.tick(now)
        return breaker

    def give_back(self, name: str, breaker: Breaker, now: float) -> None:
        """The engine left. What its breaker knows is kept, for the engines that left last."""
        if not breaker.remembers(now):
            return
        self._spare.setdefault(name, []).append(breaker)
        self._spare.move_to_end(name)
        while sum(map(len, self._spare.values())) > MAX_REMEMBERED:
            self._spare.popitem(last=False)
