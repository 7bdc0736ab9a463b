"""A tiny random model with a tokenizer, and constraints for what it generates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from catenary.constraints import ConstraintKind
from services.engine.constraints import Bits, Restriction, Vocabulary
from services.engine.domain import ConstraintOptions
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tokenizer_json, write_tiny_model
from tests.support.torch_engine import LocalCore, Output, save_tiny_model

WAIT_S = 60.0

# More logits than the tokenizer has tokens, as padded vocabularies have.
WIDTH = VOCAB_SIZE + 8

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["ß", "日本", "c"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def save_constrained_model(directory: Path, **overrides: Any) -> Path:
    """Writes the model and the tokenizer."""
    save_tiny_model("llama", directory, **{"vocab_size": WIDTH, "num_hidden_layers": 1, **overrides})
    return write_tiny_model(directory)


def tiny_vocabulary() -> Vocabulary:
    """That of the model."""
    return Vocabulary(json.dumps(tokenizer_json()), WIDTH, (EOS_ID,))


def regex(source: str, after: str | None = None) -> ConstraintOptions:
    """What matches this."""
    return ConstraintOptions(ConstraintKind.REGEX, source, after)


def schema(value: Any, after: str | None = None) -> ConstraintOptions:
    """JSON of this schema."""
    return ConstraintOptions(ConstraintKind.JSON_SCHEMA, json.dumps(value), after)


def next_tokens(one: Restriction, backend: Any, vocabulary: Vocabulary) -> list[int]:
    """What may be sampled next, by the masks of a backend: at least one."""
    bits: Bits = np.zeros((1, vocabulary.words), dtype=np.int32)
    if one.active:
        backend.fill([(one.matcher, 0)], bits)
    one.narrow(bits[0], mask_stops=False)
    flat = np.unpackbits(bits.view(np.uint8), axis=1, count=WIDTH, bitorder="little")
    allowed: list[int] = np.nonzero(flat[0])[0].tolist()
    assert allowed
    return allowed


def text_of(core: LocalCore, output: Output) -> str:
    """The text that a sequence got, without the token that ended it. Raises for bytes that are no text."""
    compiler = core.engine.grammars.compiler
    if compiler is None:
        raise ValueError("the core has no grammars")
    vocabulary = compiler.vocabulary
    stopped = output.end is not None and output.end.stop_token_id is not None
    token_ids = output.token_ids[:-1] if stopped else output.token_ids
    return b"".join(map(vocabulary.text, token_ids)).decode()


def ended(output: Output) -> str:
    """Why a sequence ended, with what is told of it."""
    if output.end is None:
        raise ValueError("the sequence has not ended")
    return ":".join(str(part) for part in (output.end.reason, output.end.error_param) if part is not None)


def settle_compile(core: LocalCore) -> None:
    """Waits until nobody waits for a constraint, without a step."""
    deadline = time.monotonic() + WAIT_S
    work: Any = core.work
    while len(work.constrained):
        assert time.monotonic() < deadline
        work.constrained.admit()
