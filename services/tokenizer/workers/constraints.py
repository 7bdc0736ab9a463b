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
    """Compiles constraints against one model's vocabulary.

    A limit of time is for who runs the process: it must be killed, as what is compiled cannot be interrupted.
    The vocabulary, which takes up to seconds, is therefore read at once.
    """

    def __init__(self, tokenizer_json: bytes, *, memory_bytes: int) -> None:
        """`memory_bytes`: what compiling one constraint may take; beyond that the process aborts."""
        self._memory_bytes = memory_bytes
        self._vocabulary = _read(tokenizer_json)

    def check(self, kind: int, source: str, param: str, *, closed: bool = False) -> None:
        """Raises RenderRefused with `param`: INVALID_ARGUMENT, or UNSUPPORTED whatever the constraint."""
        if self._vocabulary is None:
            message = "The output of this model cannot be constrained."
            raise RenderRefused(message, param=param, code=RefusalCode.UNSUPPORTED)
        tokenizer, control = self._vocabulary
        try:
            with bounded_memory(self._memory_bytes):
                grammar = to_llguidance(ConstraintKind(kind), source, control=control, closed=closed)
                check_grammar(grammar, tokenizer)
        except ConstraintError as error:
            raise RenderRefused(str(error), param=param) from None
        except MemoryError:
            raise RenderRefused("The constraint needs too much memory.", param=param) from None


def _read(tokenizer_json: bytes) -> tuple[LLTokenizer, dict[str, int]] | None:
    """None: a tokenizer whose tokens are no bytes of text, such as BERT's."""
    try:
        tokenizer = LLTokenizer(tokenizer_json.decode())
        return tokenizer, control_tokens(tokenizer_json, tokenizer)
    except ValueError:
        return None
    except BaseException as error:
        # A panic in Rust is no Exception. The service can do without constraints.
        if type(error).__name__ != "PanicException":
            raise
        return None
