"""One simulated engine: a scripted machine whose steps take virtual time, and what the router hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from catenary.blockhash import DIGEST_BYTES
from catenary.v1 import engine_pb2
from catenary_testing.engine import Script, ScriptedMachine
from services.engine.domain import FinishReason, SamplingOptions
from services.engine.link import CoreStep, KvChanges, KvContents, SubmitSequence
from services.router.fleet import Engine
from services.router.index import KvFeed, KvIndex

_NAMES_A_CHANGE = 60_000


@dataclass(frozen=True, slots=True)
class News:
    """A step's report of a sequence: a number of tokens, and whether it ended."""

    key: int
    token_ids: list[int]
    ended: bool


class SimulatedEngine:
    """Drive it by `begin` and `finish`, a step each, `cost_s` of virtual time apart."""

    def __init__(self, engine: Engine, script: Script, index: KvIndex[Engine]) -> None:
        self.engine = engine
        self.alive = True
        self.busy = False
        self.slowness = 1.0
        self.stepped = 0
        self._machine = ScriptedMachine(script)
        self._machine.kv_event_delta.follow()
        self._feed = KvFeed(index, engine)
        self._number = 0
        self._reports = 0
        self._made: CoreStep | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._machine.has_work

    def submit(self, key: int, token_ids: list[int], max_tokens: int) -> None:
        """Take a sequence."""
        self._machine.submit(
            SubmitSequence(
                key=key,
                token_ids=token_ids,
                prompt_len=len(token_ids),
                sampling=SamplingOptions(temperature=0.0, seed=key),
                max_tokens=max_tokens,
                min_tokens=max_tokens,
                stop_token_ids=[],
                ignore_eos=True,
            )
        )

    def begin(self) -> float:
        """Begin a step; how long it takes."""
        self.busy = True
        self._made = self._machine.step()
        return self._machine.cost_s * self.slowness

    def finish(self) -> list[News]:
        """Return the step is over; what it made."""
        self.busy = False
        made, self._made = self._made, None
        if made is None:
            return []
        self.stepped += 1
        return list(_news(made))

    def report(self, now: float) -> None:
        """Tell the router the load."""
        load = self._machine.load
        self._reports += 1
        self.engine.heard(now)
        self.engine.apply(
            engine_pb2.LoadReport(
                sequence=self._reports,
                state=engine_pb2.ENGINE_STATE_SERVING,
                running=load.running,
                waiting=load.waiting,
                used_blocks=load.used_blocks,
                total_blocks=self.engine.capacity.total_blocks,
                pending_prefill_tokens=load.pending_prefill_tokens,
                steps=load.steps,
                generated_tokens=load.generated_tokens,
            )
        )

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Prompt tokens that were started, and those of them that were cached."""
        load = self._machine.load
        return load.prompt_tokens, load.cached_prompt_tokens

    def tell_kv(self) -> Callable[[], None] | None:
        """Return the action for when the cache's changes reach the router; None without changes."""
        news = list(self._machine.kv_event_delta.due())
        if not news:
            return None
        return lambda: self._hear(news)

    def _hear(self, news: list[KvContents | KvChanges]) -> None:
        for part in news:
            if isinstance(part, KvContents):
                self._feed.snapshot(
                    engine_pb2.KvSnapshot(
                        number=self._number, names=part.names, first=part.first, last=part.last
                    )
                )
                continue
            changes = [engine_pb2.KvChange(cleared=True)] if part.cleared else []
            changes += [engine_pb2.KvChange(removed=names) for names in _parts(part.removed)]
            changes += [engine_pb2.KvChange(stored=names) for names in _parts(part.stored)]
            count = part.cleared + (len(part.removed) + len(part.stored)) // DIGEST_BYTES
            self._feed.changes(engine_pb2.KvChanges(first_number=self._number + 1, changes=changes))
            self._number += count

    def close(self) -> None:
        """Remove the dead engine from the router's fleet."""
        self.alive = False
        self._feed.close()


def _news(step: CoreStep) -> Iterator[News]:
    columns, start = step.columns, 0
    ends = {end.row for end in columns.ends if end.reason is not FinishReason.ABORT}
    for row, (key, count) in enumerate(zip(columns.keys, columns.token_counts, strict=True)):
        yield News(key, columns.token_ids[start : start + count], row in ends)
        start += count


def _parts(names: bytes) -> Iterator[engine_pb2.KvNames]:
    size = _NAMES_A_CHANGE * DIGEST_BYTES
    for start in range(0, len(names), size):
        yield engine_pb2.KvNames(names=names[start : start + size])
