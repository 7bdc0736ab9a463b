"""Whether a constraint can be honoured: compiled by a worker under a limit of memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llguidance import LLTokenizer

from catenary.constraints import (
    ConstraintError,
    ConstraintKind,
    check_grammar,
    control_tokens,
    to_llguidance,
)
from services.tokenizer.rendering import RefusalCode, RenderRefused


class ConstraintChecker:
    """Compiles constraints against one model's vocabulary, which is read when it is needed first.

    A limit of time is for who runs the process: it must be killed, as what is compiled cannot be interrupted.
    """

    def __init__(self, tokenizer_json: bytes, *, memory_bytes: int) -> None:
        """`memory_bytes`: what compiling one constraint may take; beyond that the process aborts."""
        self._file = tokenizer_json
        self._memory_bytes = memory_bytes
        self._loaded: tuple[LLTokenizer, dict[str, int]] | None = None

    def check(self, kind: int, source: str, param: str) -> None:
        """Raises RenderRefused with `param`: INVALID_ARGUMENT, or UNSUPPORTED whatever the constraint."""
        tokenizer, control = self._vocabulary(param)
        try:
            with _bounded(self._memory_bytes):
                check_grammar(to_llguidance(ConstraintKind(kind), source, control=control), tokenizer)
        except ConstraintError as error:
            raise RenderRefused(str(error), param=param) from None
        except MemoryError:
            raise RenderRefused("The constraint needs too much memory.", param=param) from None

    def _vocabulary(self, param: str) -> tuple[LLTokenizer, dict[str, int]]:
        if self._loaded is None:
            try:
                tokenizer = LLTokenizer(self._file.decode())
                self._loaded = tokenizer, control_tokens(self._file, tokenizer)
            except ValueError:
                raise RenderRefused(
                    "The output of this model cannot be constrained.",
                    param=param,
                    code=RefusalCode.UNSUPPORTED,
                ) from None
        return self._loaded


@contextmanager
def _bounded(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + more
    resource.setrlimit(
        resource.RLIMIT_AS, (ceiling if soft == resource.RLIM_INFINITY else min(ceiling, soft), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
