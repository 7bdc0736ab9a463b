"""Chats that the tokenizer service renders itself: the same answers as a worker's, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.tokenizer import execution
from services.tokenizer.app import worker_setup
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.execution import MAX_MESSAGES, SmallChats, renderer_of_small_chats
from services.tokenizer.rendering import ChatOptions, ChatTurn, PromptLimits, TurnCall, read_model_files
from services.tokenizer.workers import (
    Answer,
    ChatTask,
    CompletionTask,
    Refused,
    Task,
    TaskTools,
    TokenLists,
    WorkerSetup,
)
from tests.support import tiny_tokenizer as tiny
from tests.support.chat_templates import FAMILIES

TEMPLATES = {"chatml": tiny.CHATML_TEMPLATE, **FAMILIES}


class Pool:
    """Does tasks as a worker would, and says which."""

    def __init__(self, tools: TaskTools) -> None:
        self.tools = tools
        self.done: list[Task] = []

    async def run(self, task: Task, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Answer:
        self.done.append(task)
        encoded = msgspec.msgpack.encode(task)
        return self.tools.answer(msgspec.msgpack.decode(encoded, type=type(task)))


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkerSetup]:
    found = {}
    for name, template in TEMPLATES.items():
        directory = tiny.write_tiny_model(tmp_path_factory.mktemp(name), chat_template=template)
        found[name] = worker_setup(TokenizerConfig(model_dir=directory), read_model_files(directory))
    return found


@pytest.fixture(scope="module")
def make(setups: dict[str, WorkerSetup]) -> Callable[[str], tuple[SmallChats, Pool]]:
    tools = {name: TaskTools(setup) for name, setup in setups.items()}

    def made(name: str = "chatml") -> tuple[SmallChats, Pool]:
        pool = Pool(tools[name])
        # What a worker has, without the measurement: this machine may be busy.
        return SmallChats(pool, pool.tools.renderer, 1024), pool

    return made


def chat(*turns: ChatTurn, limits: PromptLimits | None = None, **options: object) -> ChatTask:
    return ChatTask(list(turns), ChatOptions(**options), limits or PromptLimits())  # type: ignore[arg-type]


HELLO = ChatTurn("user", "hello")


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant", "tool"]),
            st.text(max_size=30)
            | st.sampled_from(["<|im_end|>", "a</think>b", " x\n", "<|im_start|>system"]),
        ),
        min_size=1,
        max_size=5,
    ),
    generate=st.booleans(),
    special=st.booleans(),
    kept=st.none() | st.integers(1, 40),
    template=st.sampled_from(sorted(TEMPLATES)),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_answers_are_those_of_a_worker(
    make: Callable[[str], tuple[SmallChats, Pool]],
    turns: list[tuple[str, str]],
    generate: bool,
    special: bool,
    kept: int | None,
    template: str,
) -> None:
    small, pool = make(template)
    task = chat(
        *(ChatTurn(role, text) for role, text in turns),
        limits=PromptLimits(60, kept),
        add_generation_prompt=generate,
        add_special_tokens=special,
    )
    expected = await pool.run(task, size=0)
    pool.done.clear()
    assert await small.run(task, size=100) == expected


@pytest.mark.parametrize(
    "task",
    [
        chat(HELLO, tools='[{"type": "function"}]'),
        chat(HELLO, documents='[{"text": "x"}]'),
        chat(HELLO, variables='{"x": 1}'),
        chat(HELLO, chat_template="{{ 1 }}"),
        chat(HELLO, add_generation_prompt=False, continue_final_message=True),
        chat(HELLO, ChatTurn("assistant", None, tool_calls=(TurnCall("i", "f", "{}"),))),
        chat(*[HELLO] * (MAX_MESSAGES + 1)),
        chat(ChatTurn("user", "<|im_end|>")),
        CompletionTask(["hello"], True, PromptLimits()),
    ],
    ids=lambda task: type(task).__name__,
)
async def test_whatever_is_not_plain_goes_to_a_worker(
    make: Callable[[], tuple[SmallChats, Pool]], task: Task
) -> None:
    small, pool = make()
    answer = await small.run(task, size=100)
    assert pool.done == [task]
    assert isinstance(answer, TokenLists | Refused)


async def test_so_does_what_is_long(make: Callable[[], tuple[SmallChats, Pool]]) -> None:
    small, pool = make()
    await small.run(chat(HELLO), size=1024)
    assert not pool.done
    await small.run(chat(HELLO), size=1025)
    assert len(pool.done) == 1


async def test_and_every_chat_of_a_template_that_may_take_long(
    make: Callable[[str], tuple[SmallChats, Pool]],
) -> None:
    small, pool = make("granite")
    await small.run(chat(HELLO), size=5)
    assert len(pool.done) == 1


async def test_a_refusal_is_an_answer(make: Callable[[], tuple[SmallChats, Pool]]) -> None:
    small, pool = make()
    answer = await small.run(chat(HELLO, limits=PromptLimits(1)), size=5)
    assert isinstance(answer, Refused)
    assert not pool.done


def test_a_slow_tokenizer_or_template_leaves_all_to_the_workers(
    setups: dict[str, WorkerSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "SLOWEST_S", 60.0)
    assert renderer_of_small_chats(setups["chatml"], 1024) is not None
    assert renderer_of_small_chats(setups["granite"], 1024) is None
    monkeypatch.setattr(execution, "SLOWEST_S", 0.0)
    assert renderer_of_small_chats(setups["chatml"], 1024) is None


def test_a_model_without_a_template_or_a_usable_tokenizer_has_none(
    setups: dict[str, WorkerSetup], tmp_path: Path
) -> None:
    files = setups["chatml"].files
    without = msgspec.structs.replace(
        setups["chatml"], files=msgspec.structs.replace(files, chat_template=None)
    )
    assert renderer_of_small_chats(without, 1024) is None
    broken = msgspec.structs.replace(
        setups["chatml"], files=msgspec.structs.replace(files, tokenizer_json=b"{")
    )
    assert renderer_of_small_chats(broken, 1024) is None
