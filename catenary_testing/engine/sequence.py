"""A sequence inside the scripted engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from catenary.blockhash import BlockHashes
from catenary_testing.engine.script import Rule, ScriptedModel, Then
from catenary_testing.engine.tokens import (
    best_alternatives,
    classes_of,
    fold,
    pack_vector,
    sampled_logprob,
    score_of,
    token_after,
    vector_of,
)
from services.engine.domain import PoolingOptions
from services.engine.link import SubmitSequence


class Status(Enum):
    """The state of a scripted sequence. Waiting ones hold no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One generated token."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class ScriptedSequence:
    """Its tokens so far and how the next one comes about."""

    spec: SubmitSequence
    rule: Rule | None
    model: ScriptedModel
    status: Status = Status.WAITING
    # Ids of its KV blocks, and the names of those that are full, as far as they were needed.
    block_table: list[int] = field(default_factory=list)
    names: BlockHashes | None = None
    computed: int = 0
    # Of its first start.
    cached_tokens: int = 0
    started: bool = False
    # Whether it was seen if its KV comes from another engine, and how much of it does.
    asked: bool = False
    transferred_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    digest: int = 0
    scored: bool = False
    # Of a beam search, which tells its tokens at the end.
    drawn: list[Drawn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)
        self.digest = fold(self.token_ids)

    @property
    def generated(self) -> int:
        """Tokens after the prompt, those of an earlier life included."""
        return len(self.token_ids) - self.spec.prompt_len

    @property
    def step_delay_s(self) -> float:
        """How long a step lasts at least while this sequence runs."""
        return self.rule.step_delay_ms / 1000 if self.rule else 0.0

    @property
    def outcome(self) -> Then | None:
        """The rule's ending once its tokens are used up; None before."""
        if self.rule is None or self.generated < len(self.rule.tokens):
            return None
        return None if self.rule.then in (Then.EOS, Then.HASH) else self.rule.then

    def draw(self) -> Drawn:
        """Append the next token and describe it."""
        position, index = len(self.token_ids), self.generated
        token = self._scripted(index)
        if token is None or (token in self.stop_ids() and index < self.spec.min_tokens):
            token = self._hashed(position, index)
        self.token_ids.append(token)
        self.digest = fold((token,), self.digest)
        return self._described(token, position, index)

    def prompt_scores(self) -> list[Drawn]:
        """Return log probabilities of the prompt's tokens but the first, if asked for, and once only."""
        wanted = self.spec.sampling.prompt_logprobs
        if wanted < 0 or self.scored:
            return []
        self.scored = True
        return [
            Drawn(
                token,
                sampled_logprob(token, position),
                tuple(best_alternatives(token, position, wanted, self.model.vocab_size)),
            )
            for position, token in enumerate(self.token_ids[: self.spec.prompt_len])
            if position
        ]

    @property
    def takes_hits(self) -> bool:
        """Whether cached KV may stand for its prompt's."""
        return self.spec.pooling is None and self.spec.sampling.prompt_logprobs < 0

    def block_names(self, count: int, block_size: int) -> list[bytes]:
        """Return the names of its first `count` blocks, which must be full."""
        if self.names is None:
            self.names = BlockHashes(block_size, self.spec.cache_salt.encode())
        known = len(self.names.hashes)
        if known < count:
            self.names.extend(self.token_ids[known * block_size : count * block_size])
        return self.names.hashes[:count]

    def vector(self) -> bytes:
        """Return the vector of a document: little-endian float32."""
        asked = self.spec.pooling or PoolingOptions()
        if self.model.task == "classify":
            return pack_vector(classes_of(self.token_ids, len(self.model.labels), raw=asked.raw))
        if self.model.task == "embed":
            width = self.model.embedding_width
            return pack_vector(vector_of(self.token_ids, width, asked.dimensions, raw=asked.raw))
        score = score_of(self.token_ids)
        return pack_vector([math.log(score / (1 - score)) if asked.raw else score])

    def stop_ids(self) -> set[int]:
        """Return the ids that end this sequence."""
        own = set() if self.spec.ignore_eos else set(self.model.eos_token_ids)
        return own | set(self.spec.stop_token_ids)

    def _scripted(self, index: int) -> int | None:
        rule = self.rule
        if rule is None:
            return None
        if index < len(rule.tokens):
            return rule.tokens[index]
        return self.model.eos_token_ids[0] if rule.then is Then.EOS and self.model.eos_token_ids else None

    def _hashed(self, position: int, index: int) -> int:
        avoid = {*self.model.eos_token_ids, *self.model.avoid}
        if index < self.spec.min_tokens:
            avoid.update(self.spec.stop_token_ids)
        return token_after(
            self.digest, position, seed=self.spec.sampling.seed, vocab_size=self.model.vocab_size, avoid=avoid
        )

    def _described(self, token: int, position: int, index: int) -> Drawn:
        wanted, rule = self.spec.sampling.top_logprobs, self.rule
        if wanted < 0:
            return Drawn(token, 0.0, ())
        known = rule is not None and index < len(rule.tokens) and token == rule.tokens[index]
        if rule is not None and known and rule.top_logprobs:
            top = tuple(rule.top_logprobs[index][:wanted])
        else:
            top = tuple(best_alternatives(token, position, wanted, self.model.vocab_size))
        logprob = (
            rule.logprobs[index] if rule and known and rule.logprobs else sampled_logprob(token, position)
        )
        return Drawn(token, logprob, top)
