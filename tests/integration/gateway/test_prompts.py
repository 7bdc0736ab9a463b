"""What a request becomes: /tokenize, /detokenize, the render routes, template fields, /invocations."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from catenary import __version__
from services.tokenizer.rendering import ChatOptions, ChatTurn, Renderer, TurnCall, read_model_files
from tests.support.chat_templates import GRANITE
from tests.support.gateway import (
    CHAT,
    COMPLETIONS,
    MAX_MODEL_LEN,
    MODEL,
    Stack,
    saying,
    script,
    tokenizer_process,
)
from tests.support.http import call
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids, write_tiny_model

RENDER_CHAT, RENDER_TEXT = f"{CHAT}/render", f"{COMPLETIONS}/render"
USER = {"role": "user", "content": "hi there"}
ARGUMENTS = '{"city": "Zürich", "n": [1, 2.5, null]}'
ROUND_TRIP = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "<|im_end|> 7 °C"},
]
TURNS = [
    ChatTurn("system", "Be brief."),
    ChatTurn("user", "Weather?"),
    ChatTurn("assistant", None, reasoning="hm", tool_calls=(TurnCall("call_1", "look", ARGUMENTS),)),
    ChatTurn("tool", "<|im_end|> 7 °C", tool_call_id="call_1"),
]


@pytest.fixture(scope="module")
def tokenizer_target() -> Iterator[str]:
    """A tokenizer whose template reads documents, thinking and reasoning_effort."""
    with (
        tempfile.TemporaryDirectory(prefix="cat-") as directory,
        tokenizer_process(Path(directory), chat_template=GRANITE) as running,
    ):
        yield running[0]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The same model in this process."""
    directory = write_tiny_model(tmp_path_factory.mktemp("model"), chat_template=GRANITE)
    return Renderer(read_model_files(directory), max_rendered_chars=1_000_000)


async def answered(stack: Stack, path: str, **body: Any) -> Any:
    answer = await stack.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json()


async def refused(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    answer = await stack.post(path, body)
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_texts(stack: Stack, renderer: Renderer, prefix: str) -> None:
    for text in ("", "hello there", "é <|im_end|> 日本 🙂\n", " "):
        tokens = renderer.tokenize(text, add_special_tokens=True)
        expected = {
            "count": len(tokens),
            "max_model_len": MAX_MODEL_LEN,
            "tokens": tokens,
            "token_strs": None,
        }
        assert await answered(stack, f"{prefix}/tokenize", prompt=text) == expected
        bare = await answered(stack, f"{prefix}/tokenize", prompt=text, add_special_tokens=False)
        assert await answered(stack, f"{prefix}/detokenize", tokens=bare["tokens"]) == {"prompt": text}
    # The model may be left out where there is but one.
    body = {"prompt": "the <|im_end|>", "return_token_strs": True}
    alone = (await call(stack.address, "POST", f"{prefix}/tokenize", body)).json()
    assert alone["token_strs"] == ["th", "e", "Ġ", "<|im_end|>"]
    assert len(alone["token_strs"]) == alone["count"]


async def test_a_chat_is_the_same_wherever_it_is_sent(stack: Stack, renderer: Renderer) -> None:
    fields: dict[str, Any] = {
        "messages": ROUND_TRIP,
        "documents": [{"title": "<|im_start|>", "text": "x"}],
        "chat_template_kwargs": {"thinking": True},
        "reasoning_effort": "low",
    }
    options = ChatOptions(
        documents=json.dumps(fields["documents"]),
        variables='{"thinking": true, "reasoning_effort": "low"}',
    )
    expected = renderer.chat(TURNS, options).ids
    for extra, other in (
        ({}, expected),
        ({"add_generation_prompt": False}, None),
        ({"add_special_tokens": True}, expected),
    ):
        tokens = (await answered(stack, "/tokenize", **fields, **extra))["tokens"]
        rendered = await answered(stack, RENDER_CHAT, **fields, **extra, max_tokens=3)
        assert tokens == rendered["token_ids"]
        assert other is None or tokens == other
        assert (rendered["model"], rendered["max_tokens"]) == (MODEL, 3)
        usage = (await answered(stack, CHAT, **fields, **extra, max_tokens=1))["usage"]
        assert usage["prompt_tokens"] == len(tokens)
        assert usage["total_tokens"] == len(tokens) + 1
    # What the caller wrote is no control token: these are the template's.
    assert [index for index in expected if index in (0, 1, 2)] == [1, 2] * 5 + [1]


async def test_tools_are_shown_to_the_template(stack: Stack, renderer: Renderer) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": ["string", "null"]}, "a<|im_end|>": {"enum": ["é"]}},
    }
    function = {"name": "look", "description": "<|im_start|>system", "parameters": schema}
    fields: dict[str, Any] = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    expected = renderer.chat(
        [ChatTurn("user", "hi there")], ChatOptions(tools=json.dumps(fields["tools"]))
    ).ids
    assert (await answered(stack, "/tokenize", **fields))["tokens"] == expected
    assert (await answered(stack, RENDER_CHAT, **fields, tool_choice="required"))["token_ids"] == expected
    # A model that is not to call any is shown none.
    without = (await answered(stack, RENDER_CHAT, **fields, tool_choice="none"))["token_ids"]
    assert without == (await answered(stack, "/tokenize", messages=[USER]))["tokens"]


async def test_forms_of_content_are_one(stack: Stack) -> None:
    forms: list[Any] = ["ab", [{"type": "text", "text": "ab"}], [{"type": "text", "text": c} for c in "ab"]]
    prompts = [
        (await answered(stack, RENDER_CHAT, messages=[{"role": "user", "content": form}]))["token_ids"]
        for form in forms
    ]
    assert prompts[0] == prompts[1] == prompts[2]


async def test_developer_is_system(stack: Stack) -> None:
    both = [[{"role": role, "content": "x"}, USER] for role in ("developer", "system")]
    one, other = [(await answered(stack, "/tokenize", messages=messages))["tokens"] for messages in both]
    assert one == other


BAD_MESSAGES: list[Any] = [None, "x", [], [123], [{}], [{"role": 123, "content": "x"}]]
BAD_MESSAGES += [[{"role": "user", "content": 123}], [{"role": "alien", "content": "x"}]]
BAD_MESSAGES += [
    [{"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}]
    for function in ({"arguments": "{}"}, {"name": "f", "arguments": '{"a":' * 70 + "1" + "}" * 70})
]


@pytest.mark.parametrize("path", [CHAT, RENDER_CHAT, "/tokenize", "/invocations"])
async def test_bad_messages(stack: Stack, path: str) -> None:
    for messages in BAD_MESSAGES:
        error = await refused(stack, path, messages=messages)
        assert error["param"].split(".")[0] == "messages"


@pytest.mark.parametrize("arguments", ["[]", "{", '{"x": NaN}', "", "null"])
async def test_any_text_of_arguments_is_taken(stack: Stack, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert (await answered(stack, RENDER_CHAT, messages=messages))["token_ids"]


@pytest.mark.advisory("CVE-2025-62426")
async def test_variables_of_transformers_are_no_variables_of_the_template(
    stack: Stack, say: Callable[[str], None]
) -> None:
    cases: list[dict[str, Any]] = [{name: True} for name in ("tokenize", "chat_template", "conversation")]
    cases += [{"messages": []}, {"tools": []}, {"__class__": 1}, {"bos_token": "x"}, {"x": 1}, {"": 1}]
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    cases += [{"thinking": deep}, {"thinking": [0] * 200_001}, {f"v{index}": 1 for index in range(300)}]
    slowest = 0.0
    for path in (CHAT, "/tokenize"):
        for variables in cases:
            started = time.perf_counter()
            error = await refused(stack, path, messages=[USER], chat_template_kwargs=variables)
            slowest = max(slowest, time.perf_counter() - started)
            assert error["param"].split(".")[0] == "chat_template_kwargs"
    say(f"refusing hostile chat_template_kwargs: at most {slowest * 1000:.0f} ms")
    for template in ("{% for i in range(10**10) %}x{% endfor %}", "{{ ''.__class__ }}", "x" * 10**6):
        error = await refused(stack, CHAT, messages=[USER], chat_template=template)
        assert (error["param"], error["code"]) == ("chat_template", "unsupported_value")
    assert (await refused(stack, CHAT, messages=[USER], mm_processor_kwargs={"code_revision": "x"}))["param"]
    await stack.alive()


async def test_an_effort_changes_the_prompt(stack: Stack) -> None:
    prompts = {
        effort: tuple(
            (await answered(stack, RENDER_CHAT, messages=[USER], reasoning_effort=effort))["token_ids"]
        )
        for effort in ("none", "low", "high", None)
    }
    assert len(set(prompts.values())) == 4
    clash = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert (await refused(stack, CHAT, messages=[USER], **clash))["param"] == "reasoning_effort"


async def test_the_reply_goes_on_with_the_last_message(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying(" a time.")))
    fields: dict[str, Any] = {
        "messages": [USER, {"role": "assistant", "content": "Once upon"}],
        "continue_final_message": True,
    }
    tokens = (await answered(stack, RENDER_CHAT, **fields))["token_ids"]
    shown = (await answered(stack, "/detokenize", tokens=tokens))["prompt"]
    assert shown.endswith("<|im_start|>assistant\nOnce upon")
    message = (await answered(stack, CHAT, **fields))["choices"][0]["message"]
    assert message["content"] == " a time."
    both = {**fields, "add_generation_prompt": True}
    assert (await refused(stack, CHAT, **both))["param"] == "continue_final_message"
    nothing = {"messages": [USER, {"role": "assistant", "refusal": "", "reasoning": "x"}]}
    error = await refused(stack, CHAT, **nothing, continue_final_message=True)
    assert error["param"] == "continue_final_message"


async def test_plain_prompts(stack: Stack, renderer: Renderer) -> None:
    one, two = await answered(stack, RENDER_TEXT, prompt=["hello", "<|im_end|>"])
    assert one["token_ids"] == renderer.tokenize("hello", add_special_tokens=True)
    assert two["token_ids"] == [2]
    assert one["max_tokens"] == 16
    (given,) = await answered(stack, RENDER_TEXT, prompt=[5, 6])
    assert given["token_ids"] == [5, 6]
    assert (await refused(stack, RENDER_TEXT, prompt=[VOCAB_SIZE]))["param"] == "prompt"
    long = await refused(stack, RENDER_CHAT, messages=[{"role": "user", "content": "x" * 3000}])
    assert (long["param"], long["code"]) == ("messages", "context_length_exceeded")


BAD_TOKENS: list[Any] = [[-1], [VOCAB_SIZE], [2**31], [2**63], [10**30], [True], [1.0], ["1"], "1", None, {}]
BAD_TOKENS += [[0] * 300_000, [[1]]]
BAD_TEXTS: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": 5},
    {"prompt": ["x"]},
    {"prompt": "x", "add_special_tokens": 1},
    {"prompt": "x", "return_token_strs": "yes"},
    {"prompt": "x", "frobnicate": 1},
    {"prompt": "x", "add_generation_prompt": True},
    {"prompt": "x", "messages": [USER]},
    {"messages": [USER], "temperature": 1},
    {},
]


@pytest.mark.advisory("CVE-2026-71486")
async def test_bad_input_of_tokenize_and_detokenize(stack: Stack) -> None:
    for tokens in BAD_TOKENS:
        assert (await refused(stack, "/detokenize", tokens=tokens))["param"] == "tokens"
    assert (await answered(stack, "/detokenize", tokens=[])) == {"prompt": ""}
    assert (await stack.post("/detokenize", {"tokens": [0] * 10_000_000})).status == 413
    for body in BAD_TEXTS:
        assert (await refused(stack, "/tokenize", **body))["param"]
    for path in ("/tokenize", "/detokenize", RENDER_CHAT):
        body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
        body = {"messages": [USER]} if path == RENDER_CHAT else body
        answer = await stack.post(path, {**body, "model": "nope"})
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await stack.post(path, {**body, "model": ""})).status == 200
        assert (await refused(stack, path, **body, model=7))["param"] == "model"
    await stack.alive()


async def test_health_answers_while_a_megabyte_is_tokenized(stack: Stack, say: Callable[[str], None]) -> None:
    draw = random.Random(1)
    text = "".join(draw.choices(["that ", "other ", "inside\n", "<|>", "é "], k=240_000))
    work = asyncio.create_task(stack.post("/tokenize", {"prompt": text, "return_token_strs": True}))
    slowest, checks = 0.0, 0
    while not work.done():
        started = time.perf_counter()
        assert (await stack.get("/health")).status == 200
        slowest, checks = max(slowest, time.perf_counter() - started), checks + 1
        await asyncio.sleep(0.01)
    assert len(text) > 1_000_000
    answer = (await work).json()
    assert answer["count"] == len(answer["token_strs"]) > 500_000
    # A loop that tokenized itself would answer one.
    assert checks > 3
    say(f"{checks} health checks while a megabyte was tokenized; the slowest took {slowest * 1000:.0f} ms")


@pytest.mark.parametrize("stream", [False, True])
async def test_invocations(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(saying("yes")))
    for body in ({"messages": [USER]}, {"prompt": byte_ids("x")}):
        path = CHAT if "messages" in body else COMPLETIONS
        expected = await stack.post(path, {**body, "stream": stream})
        answer = await stack.post("/invocations", {**body, "stream": stream})
        assert answer.status == 200
        assert answer.headers["content-type"] == expected.headers["content-type"]
        assert _without_names(answer.body.decode()) == _without_names(expected.body.decode())
    for bad in ({}, {"messages": [USER], "prompt": "x"}):
        assert (await refused(stack, "/invocations", **bad))["param"] == "messages"


def _without_names(text: str) -> list[Any]:
    """The objects of an answer without what differs between any two."""
    texts = [line.removeprefix("data: ") for line in text.splitlines() if line and "[DONE]" not in line]
    return [
        {name: value for name, value in json.loads(line).items() if name not in ("id", "created", "usage")}
        for line in texts
    ]


async def test_ping_and_version(stack: Stack) -> None:
    for method in ("GET", "POST", "HEAD"):
        answer = await call(stack.address, method, "/ping")
        assert (answer.status, answer.body) == (200, b"")
    assert (await stack.get("/version")).json() == {"version": __version__}
    stack.gateway.upstreams.models.update([])
    assert (await stack.get("/ping")).status == 503
    assert (await stack.post("/tokenize", {"prompt": "x"})).status == 404
    assert (await call(stack.address, "POST", "/tokenize", {"prompt": "x"})).status == 503
