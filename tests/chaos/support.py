"""What the chaos tests ask for, and what must be answered."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from catenary_testing.engine import Match, Rule, Script, ScriptedCapacity, ScriptedModel, Then
from tests.support.e2e_stack import ProcessStack
from tests.support.gateway import NOT_PLAIN
from tests.support.specs import expected_tokens
from tests.support.tiny_tokenizer import (
    CHATML_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    byte_id,
    byte_ids,
    tokenizer_json,
)
from tests.support.token_stream import TokenStream

Say = Callable[[str], None]

MODEL = "tiny"
# A prompt that begins with this token is answered slowly enough to be watched.
SLOW_ID = byte_id(ord("~"))
STEP_MS = 15
# A chat of this one text takes long to render, long enough to be caught at it.
SPIN = "spin"
TEMPLATE = (
    "{% if messages[0]['content'] == '" + SPIN + "' %}"
    "{% for outer in range(400) %}{% for inner in range(20000) %}{% endfor %}{% endfor %}"
    "{% endif %}" + CHATML_TEMPLATE
)

_numbers = itertools.count(1)


def chaos_script() -> Script:
    """Every continuation is a hash that the tests can compute; nothing ends by itself."""
    return Script(
        model=ScriptedModel(
            vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,), max_model_len=100_000, avoid=NOT_PLAIN
        ),
        capacity=ScriptedCapacity(total_blocks=40_000, max_running=64, max_waiting=512),
        rules=(Rule(prompt=(SLOW_ID,), match=Match.PREFIX, then=Then.HASH, step_delay_ms=STEP_MS),),
    )


def scripted_flags(directory: Path, **fields: Any) -> tuple[str, ...]:
    """Flags of engines that follow this script, with other `fields`, from a file in a directory."""
    path = directory / "script.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(chaos_script(), **fields)))
    return "--script", str(path)


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json()))


def slow_prompt() -> list[int]:
    """Ids of a prompt that nobody else has, answered at STEP_MS a token."""
    return [SLOW_ID, *byte_ids(f"prompt {next(_numbers)}")]


def fast_prompt() -> list[int]:
    """The same, answered at once."""
    return byte_ids(f"prompt {next(_numbers)}")


def body(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion request with a fixed seed."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "seed": 7, **fields}


def expected_text(prompt: list[int], max_tokens: int) -> str:
    """What the answer to `body` must read."""
    ids = expected_tokens(prompt, max_tokens, seed=7, script=chaos_script())
    return str(_tokenizer().decode(ids, skip_special_tokens=False))


class Asked:
    """A streamed request together with the answer it must get."""

    def __init__(self, stack: ProcessStack, max_tokens: int, *, slow: bool = True) -> None:
        prompt = slow_prompt() if slow else fast_prompt()
        self.expected = expected_text(prompt, max_tokens)
        self.stream = TokenStream(stack.address, body(prompt, max_tokens))

    async def exact(self) -> None:
        """The whole answer came, byte by byte the right one."""
        stream = await self.stream.finish()
        assert (stream.status, stream.error, stream.broken) == (200, None, False)
        assert stream.text == self.expected
        assert (stream.finish_reason, stream.done, stream.after_done) == ("length", True, b"")


async def serves_exactly(stack: ProcessStack, count: int = 4) -> None:
    """New requests, on every engine, are answered exactly."""
    asked = [Asked(stack, 12, slow=False) for _ in range(count)]
    for one in asked:
        await one.exact()
