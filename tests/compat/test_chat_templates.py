"""Users' bug reports, section E: chat templates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import CHAT, COMPLETIONS, Stack, running_stack, tokenizer_process
from tests.support.tiny_tokenizer import ENDOFTEXT_ID, IM_START_ID

RENDER = f"{COMPLETIONS}/render"
# Writes the BOS itself; the tokenizer file adds it too.
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools here.') }}"
    "{% endif %}<|im_start|>{{ m.role + ':' + m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def bos_target() -> Iterator[str]:
    """A tokenizer whose file adds a BOS and whose template writes one."""
    with (
        tempfile.TemporaryDirectory(prefix="cat-") as directory,
        tokenizer_process(Path(directory), chat_template=BOS_TEMPLATE, add_bos=True) as running,
    ):
        yield running[0]


async def tokens(stack: Stack, **body: Any) -> list[int]:
    answer = await stack.post("/tokenize", body)
    assert answer.status == 200, answer.body
    found: list[int] = answer.json()["tokens"]
    return found


async def test_c48_there_is_one_bos(run_dir: Path, bos_target: str) -> None:
    async with running_stack(run_dir, bos_target) as stack:
        for extra in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            chat = await tokens(stack, messages=[{"role": "user", "content": "x"}], **extra)
            assert chat.count(ENDOFTEXT_ID) == 1
            assert chat[:2] == [ENDOFTEXT_ID, IM_START_ID]
        for prompt in ("x", "<|endoftext|>x"):
            ids = await tokens(stack, prompt=prompt)
            assert ids.count(ENDOFTEXT_ID) == 1
            answer = await stack.complete(prompt, max_tokens=1)
            assert answer.json()["usage"]["prompt_tokens"] == len(ids)
            (bare,) = (await stack.post(RENDER, {"prompt": prompt, "add_special_tokens": False})).json()
            assert bare["token_ids"].count(ENDOFTEXT_ID) == prompt.count("<|endoftext|>")
        assert ENDOFTEXT_ID not in await tokens(stack, prompt="x", add_special_tokens=False)
        # C49: what a template does not take, it says itself.
        tool = {"role": "tool", "content": "x", "tool_call_id": "c"}
        error = (await stack.post(CHAT, {"messages": [tool]})).json()["error"]
        assert (error["message"], error["param"]) == ("No tools here.", "messages")


SAID = [
    [("system", "one")],
    [("system", "one"), ("system", "two"), ("user", "three")],
    [("user", "one"), ("system", "two")],
    [("system", "one"), ("developer", "two"), ("user", "three"), ("assistant", "four"), ("system", "five")],
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: "-".join(role for role, _ in said))
async def test_c49_all_that_was_said_is_in_the_prompt_in_order(
    stack: Stack, said: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": text} for role, text in said]
    ids = await tokens(stack, messages=messages)
    prompt = (await stack.post("/detokenize", {"tokens": ids})).json()["prompt"]
    places = [prompt.index(text) for _, text in said]
    assert places == sorted(places)
    assert (await stack.post(CHAT, {"messages": messages, "max_tokens": 1})).status == 200


async def test_c49_a_text_is_a_list_of_one_part(stack: Stack) -> None:
    texts = ["x", [{"type": "text", "text": "x"}]]
    one, other = [await tokens(stack, messages=[{"role": "user", "content": text}]) for text in texts]
    assert one == other
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    both = await tokens(stack, messages=[{"role": "user", "content": parts}])
    assert both == await tokens(stack, messages=[{"role": "user", "content": "xy"}])
