"""Whether a constraint can be honoured: compiled by a worker under a limit of memory."""

from __future__ import annotations

from llguidance import LLTokenizer

from catenary.constraints import (
    ConstraintError,
    ConstraintKind,
    check_grammar,
    control_tokens,
    to_llguidance,
)
from services.tokenizer.memory import bounded_memory
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
            with bounded_memory(self._memory_bytes):
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
