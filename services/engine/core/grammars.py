"""Opens what a core needs for constrained output."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catenary.constraints import ConstraintLimits
from catenary.telemetry import get_logger
from services.engine.constraints import (
    ConstraintCompiler,
    Constraints,
    GuidanceBackend,
    VocabularyError,
    open_xgrammar,
    read_vocabulary,
)
from services.engine.model import DirectoryFacts
from services.engine.options import EngineOptions

_MOST_THREADS = 8

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Grammars:
    """A compiler, and how many sequences may wait for it, and how many seconds each.

    Without a compiler constrained sequences are refused.
    """

    compiler: ConstraintCompiler | None = None
    queue: int = 0
    timeout_s: float = 0.0

    def constraints(self, wake: Callable[[], None]) -> Constraints:
        """The constraints of a loop that `wake` wakes from any thread."""
        return Constraints(self.compiler, limit=self.queue, seconds=self.timeout_s, wake=wake)

    def close(self) -> None:
        """Ends the compiler's threads."""
        if self.compiler is not None:
            self.compiler.close()


NO_GRAMMARS = Grammars()


def open_grammars(options: EngineOptions, directory: Path, width: int, facts: DirectoryFacts) -> Grammars:
    """The grammars for a model with logits of this width; none if its tokenizer does not allow it.

    Raises ValueError if the backend is not installed.

    Takes up to a second, in which no other thread runs: so before the engine serves.
    """
    if not (directory / "tokenizer.json").is_file():
        log.info("the model has no tokenizer.json: its sequences cannot be constrained")
        return NO_GRAMMARS
    try:
        vocabulary = read_vocabulary(directory, width, facts.eos_token_ids)
    except VocabularyError as error:
        log.warning("the model cannot be given constraints", reason=str(error))
        return NO_GRAMMARS
    threads = options.grammar_threads or max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    makers = {"llguidance": GuidanceBackend, "xgrammar": open_xgrammar}
    limits = ConstraintLimits(max_digits=options.grammar_number_digits)
    compiler = ConstraintCompiler(
        makers[options.grammar_backend](vocabulary, threads, limits),
        vocabulary,
        threads=threads,
        queue=options.grammar_queue,
        cached=options.grammar_cache,
        cached_bytes=options.grammar_cache_kib << 10,
        number_digits=options.grammar_number_digits,
    )
    return Grammars(compiler, options.grammar_queue, options.grammar_timeout_s)
