"""Users' bug reports, section D: C40 and C41, and C03 again, with a template that opens the tag itself."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from catenary_testing.engine import Script
from tests.support.chat_answers import told
from tests.support.gateway import Stack, running_stack, saying, script, tokenizer_process
from tests.support.http import Answer
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import THINK_ID, byte_ids

MODES = pytest.mark.parametrize("stream", [False, True])
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking_tokenizer() -> Iterator[str]:
    """A tokenizer process whose template opens the thoughts; its parser is found, not named."""
    with (
        tempfile.TemporaryDirectory(prefix="cat-") as directory,
        tokenizer_process(Path(directory), chat_template=TEMPLATE) as running,
    ):
        yield running[0]


@pytest.fixture
async def start_thinking(run_dir: Path, thinking_tokenizer: str) -> AsyncIterator[StartStack]:
    async with AsyncExitStack() as running:

        async def start(script: Script | None = None, **options: Any) -> Stack:
            made = running_stack(run_dir, thinking_tokenizer, script, **options)
            return await running.enter_async_context(made)

        yield start


async def ask(stack: Stack, *, stream: bool, **fields: Any) -> tuple[Answer, int]:
    """The answer, and how many of its tokens were thoughts."""
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = await stack.chat(stream=stream, **fields)
    usage = answer.events[-2]["usage"] if stream else answer.json()["usage"]
    return answer, usage["completion_tokens_details"]["reasoning_tokens"]


@MODES
async def test_c40_what_is_cut_is_what_the_template_began(start_thinking: StartStack, stream: bool) -> None:
    stack = await start_thinking(script(saying("thinking... and on")))
    for switch in ({}, THINKING):
        answer, thoughts = await ask(stack, stream=stream, max_tokens=11, **switch)
        said = told(answer)
        assert (said.reasoning, said.content, said.finish_reason) == ("thinking...", "", "length")
        assert thoughts == 11
        if not stream:
            assert answer.json()["choices"][0]["message"]["content"] is None
    answer, thoughts = await ask(stack, stream=stream, max_tokens=11, **SILENT)
    said = told(answer)
    assert (said.reasoning, said.content, said.finish_reason) == ("", "thinking...", "length")
    assert thoughts == 0


@MODES
async def test_c41_an_answer_without_the_closing_tag(start_thinking: StartStack, stream: bool) -> None:
    stack = await start_thinking(script(saying("Answer.")))
    answer, thoughts = await ask(stack, stream=stream, **THINKING)
    said = told(answer)
    assert (said.reasoning, said.content, said.finish_reason, thoughts) == ("Answer.", "", "stop", 7)
    answer, thoughts = await ask(stack, stream=stream, **SILENT)
    said = told(answer)
    assert (said.reasoning, said.content, said.finish_reason, thoughts) == ("", "Answer.", "stop", 0)


@MODES
async def test_c03_thoughts_end_at_the_tag_whatever_is_held_back(
    start_thinking: StartStack, stream: bool
) -> None:
    tokens = [*byte_ids("x"), THINK_ID + 1, *byte_ids("y")]
    stack = await start_thinking(script(saying(tokens), step_delay_ms=2))
    for stop in (None, ["b,c"], ["</thx"]):
        answer, thoughts = await ask(stack, stream=stream, stop=stop)
        said = told(answer)
        assert (said.reasoning, said.content, thoughts) == ("x", "y", 2)
