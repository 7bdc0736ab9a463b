"""Users' bug reports C05 and C19 with a vocabulary as SentencePiece makes them: a space at the front of
words and of the text, which the decoder takes away again, and single bytes for what is in no word.

The model's name has a slash, as names of the hub do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from catenary_testing.engine import Rule
from tests.support.answers import choices_of, joined
from tests.support.gateway import Stack, running_stack, saying, script, tokenizer_process
from tests.support.tiny_tokenizer import ADDED_TOKENS, tokenizer_json

SPACE = "\u2581"
CHARACTERS = [SPACE, *map(chr, range(33, 127))]
WORDS = [("C", "a"), ("Ca", "r"), ("o", "l"), ("Car", "ol"), (SPACE, "Carol"), ("s", "ky"), ("k", "y")]
PIECES = [*ADDED_TOKENS, *CHARACTERS, *(left + right for left, right in WORDS)]
FIRST_BYTE = len(PIECES)
NAME = "org/pieces"
MODES = pytest.mark.parametrize("stream", [False, True])


def vocabulary() -> dict[str, Any]:
    """The content of tokenizer.json."""
    names = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizer_json(add_bos=True)
    space, text = {"pattern": {"String": " "}, "content": SPACE}, {"String": SPACE}
    decoders = [{"type": "Replace", "pattern": text, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    normalizers = [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", **space}]
    model = {
        **made["model"],
        "byte_fallback": True,
        "vocab": {name: index for index, name in enumerate(names)},
        "merges": [list(pair) for pair in WORDS],
    }
    return {
        **made,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def pieces(text: str) -> list[int]:
    """One token for each byte of it."""
    return [FIRST_BYTE + byte for byte in text.encode()]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="cat-") as directory,
        tokenizer_process(
            Path(directory), flags=("--served-model-name", NAME), add_bos=True, vocabulary=vocabulary()
        ) as running,
    ):
        yield running[0]


def serving(directory: Path, target: str, *rules: Rule, **fields: Any) -> AbstractAsyncContextManager[Stack]:
    """A stack that serves the model."""
    return running_stack(directory, target, script(*rules, **fields), engine={"served_model_name": NAME})


async def echoed(stack: Stack, prompt: str, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """The text, and the four arrays of all its chunks."""
    answer = await stack.complete(prompt, model=NAME, echo=True, logprobs=1, max_tokens=2, **fields)
    found = [choice["logprobs"] for choice in choices_of(answer) if choice["logprobs"]]
    return joined(answer)[0], {
        name: [item for part in found for item in part[name]] for name in found[0] if found[0][name]
    }


@MODES
async def test_c19_tokens_of_the_prompt_are_its_own(run_dir: Path, target: str, stream: bool) -> None:
    carol = PIECES.index(SPACE + "Carol")
    async with serving(run_dir, target, saying([carol, *pieces("!")])) as stack:
        for prompt, names in (
            ("\n1. Carol", ["", "\n", "1", ".", " Carol"]),
            ("Carol Carol", ["Carol", " Carol"]),
            (" sky", ["", " ", "sky"]),
        ):
            text, columns = await echoed(stack, prompt, stream=stream)
            bos, *tokens = columns["tokens"]
            assert text == f"{prompt} Carol!"
            assert "".join(tokens) == text, tokens
            assert bos == "<|endoftext|>"
            assert tokens == [*names, " Carol", "!"]
            assert columns["token_logprobs"][0] is None
            assert all(value <= 0 for value in columns["token_logprobs"][1:])
            for offset, token in zip(columns["text_offset"][1:], tokens, strict=True):
                assert text[offset:].startswith(token)


@MODES
async def test_c05_characters_of_single_bytes(run_dir: Path, target: str, stream: bool) -> None:
    text = "A \u4e16\u754c\U0001f336\ufe0f\u00e9"
    async with serving(run_dir, target, saying(pieces(text)), step_delay_ms=5) as stack:
        answer = await stack.complete("x", model=NAME, max_tokens=64, stream=stream)
        assert joined(answer) == (text, "stop")
        assert "\ufffd" not in answer.body.decode()


async def test_assertion_01_a_name_with_a_slash(run_dir: Path, target: str) -> None:
    async with serving(run_dir, target) as stack:
        for path in (NAME, NAME.replace("/", "%2F"), NAME.replace("/", "%2f")):
            assert (await stack.get(f"/v1/models/{path}")).json()["id"] == NAME
        async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == [NAME]
            assert (await client.models.retrieve(NAME)).object == "model"
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve("org/other")
            assert caught.value.code == "model_not_found"
