"""A core that computes nothing: every live sequence gets a token in each step, at a fixed pace.

Run by `played_engine`. It stands in a process of its own where a real core stands, so that what is measured
of the engine's servicer is the servicer alone.
"""

from __future__ import annotations

import argparse
import socket
import time

import msgspec

from catenary.frames import LinkClosed
from services.engine.domain import FinishReason
from services.engine.link import (
    AbortSequences,
    BlockingLink,
    CapacityFacts,
    CoreLoad,
    CoreReady,
    CoreStep,
    EndRow,
    ModelFacts,
    StartCore,
    StepColumns,
    StopCore,
    SubmitSequence,
    ToCore,
)


class Played(msgspec.Struct, frozen=True):
    """Model and step times of a played core. `tokens`: ids that it samples in turn."""

    step_ms: float
    max_running: int
    max_model_len: int
    vocab_size: int
    eos_token_id: int
    tokens: list[int]


class PlayedCore:
    """Sequences, and what is left to say of each."""

    def __init__(self, link: BlockingLink, played: Played) -> None:
        self._link = link
        self._played = played
        self._live: dict[int, tuple[SubmitSequence, int]] = {}
        self._ended: list[tuple[SubmitSequence, int, FinishReason]] = []
        self._steps = 0

    def run(self) -> None:
        """Step until the servicer says stop or goes away."""
        played = self._played
        facts = ModelFacts(played.max_model_len, played.vocab_size, [played.eos_token_id], "float32", "")
        blocks = played.max_running * played.max_model_len // 16
        capacity = CapacityFacts(16, blocks, played.max_running, played.max_running, 8192)
        self._link.send(CoreReady(facts, capacity))
        due = time.monotonic()
        while True:
            due = max(due + played.step_ms / 1e3, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                # poll has milliseconds.
                messages = self._link.poll(left if left > 0.001 else 0.0)
                for message in messages:
                    if isinstance(message, StopCore):
                        return
                    self._take(message)
                if not messages and left <= 0.001:
                    time.sleep(left)
            self._step()

    def _take(self, message: ToCore) -> None:
        if isinstance(message, SubmitSequence):
            self._live[message.key] = message, 0
        elif isinstance(message, AbortSequences):
            for key in message.keys:
                if (found := self._live.pop(key, None)) is not None:
                    self._ended.append((*found, FinishReason.ABORT))

    def _step(self) -> None:
        if not self._live and not self._ended:
            return
        self._steps += 1
        words = self._played.tokens
        ends: list[EndRow] = []
        ids: list[int] = []
        keys = list(self._live)
        specs = [spec for spec, _ in self._live.values()]
        for row, (key, (spec, said)) in enumerate(list(self._live.items())):
            ids.append(words[(key + said) % len(words)])
            self._live[key] = spec, said + 1
            if said + 1 == spec.max_tokens:
                del self._live[key]
                ends.append(EndRow(row, FinishReason.LENGTH, spec.prompt_len, 0, said + 1))
        for spec, said, reason in self._ended:
            ends.append(EndRow(len(keys), reason, spec.prompt_len, 0, said))
            keys.append(spec.key)
        counts = [1] * len(ids) + [0] * len(self._ended)
        self._ended.clear()
        columns = self._scored(keys, counts, ids, ends, specs)
        self._link.send(CoreStep(columns, CoreLoad(running=len(self._live), steps=self._steps)))

    def _scored(
        self,
        keys: list[int],
        counts: list[int],
        ids: list[int],
        ends: list[EndRow],
        specs: list[SubmitSequence],
    ) -> StepColumns:
        """With the log probabilities that sequences asked for: the same for every token."""
        rows = [row for row, spec in enumerate(specs) if spec.sampling.top_logprobs >= 0]
        if not rows:
            return StepColumns(keys=keys, token_counts=counts, token_ids=ids, ends=ends)
        tops = [specs[row].sampling.top_logprobs for row in rows]
        return StepColumns(
            keys=keys,
            token_counts=counts,
            token_ids=ids,
            ends=ends,
            logprob_rows=rows,
            sampled=[-0.5] * len(rows),
            top_counts=tops,
            top_ids=[self._played.tokens[place] for top in tops for place in range(top)],
            top_logprobs=[-0.5 - place for top in tops for place in range(top)],
        )


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link-fd", type=int, required=True)
    link = BlockingLink(socket.socket(fileno=parser.parse_args().link_fd))
    try:
        first, *_ = link.poll(None)
        if isinstance(first, StartCore):
            PlayedCore(link, msgspec.json.decode(first.config_json, type=Played)).run()
    except LinkClosed:
        return


if __name__ == "__main__":
    main()
