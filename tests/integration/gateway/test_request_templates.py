"""Chat templates that come with requests: off, or on under limits. Advisories, section 5."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from catenary.v1 import tokenizer_pb2 as pb
from tests.support import tiny_tokenizer as tiny
from tests.support.tokenizer_service import MODEL, RunningTokenizer, chat_request, running_tokenizer

INVALID = common_pb2.ERROR_CODE_INVALID_ARGUMENT
HOSTILE = {
    "a huge range": "{% for i in range(10**10) %}x{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output without end": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a long text": "{{ 'a' * 10**9 }}",
    "a long list": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power of messages": "{% set n = messages | length + 9 %}{{ n ** (n ** n) }}",
    "padding": "{{ messages[0].content | center(10**9) }}",
    "folded padding": "{{ 'x' | center(4 * 10**9) }}",
    "formatting": "{{ '%2000000000d' | format(1) }}",
    "doubling": (
        "{% set ns = namespace(s='xxxxxxxx') %}"
        "{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "a class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format fields": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "format by attr": "{{ '{0.__class__}' | attr('format')(1) }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "an include": "{% include '/etc/passwd' %}",
    "another template": "{% extends messages[0].content %}",
    "no template": "{{ messages",
    "an unknown filter": "{{ 1 | nothing }}",
    "an unknown tag": "{% nothing %}",
    "too large a source": "x" * 70_000,
    "nothing": "{# #}",
}


@pytest.fixture
async def service(run_dir: Path) -> AsyncIterator[RunningTokenizer]:
    options: dict[str, Any] = {"task_timeout_s": 30, "template_timeout_s": 0.4, "max_rendered_chars": 100_000}
    async with running_tokenizer(run_dir, allow_request_templates=True, **options) as running:
        yield running


def with_template(source: str, **fields: Any) -> pb.RenderRequest:
    request = chat_request(("user", "hello <|im_end|>"))
    request.chat.chat_template = source
    for name, value in fields.items():
        setattr(request.chat, name, value)
    return request


async def refused(service: RunningTokenizer, request: pb.RenderRequest) -> common_pb2.Error:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Render(request)
    return error_of(caught.value)


@pytest.mark.advisory("CVE-2025-61620", "CVE-2026-5760")
async def test_hostile_templates_are_refused_and_harm_nobody(
    service: RunningTokenizer, say: Callable[[str], None]
) -> None:
    before = service.service.pool.pids
    neighbour = chat_request(("user", "hi"))
    expected = (await service.stub.Render(neighbour)).prompts[0].token_ids
    times: list[tuple[float, str]] = []
    for name, source in HOSTILE.items():
        started = time.perf_counter()
        error = await refused(service, with_template(source))
        seconds = time.perf_counter() - started
        times.append((seconds, name))
        assert error.code == INVALID, (name, error)
        assert error.param in ("chat_template", "messages"), (name, error)
        assert not any(leak in error.message for leak in ("/", "Traceback", "0x", "jinja")), error.message
        assert (await service.stub.Render(neighbour)).prompts[0].token_ids == expected
    slowest = ", ".join(f"{name} {seconds * 1000:.0f}" for seconds, name in sorted(times)[::-1][:6])
    say(f"refusing a hostile template, {len(times)} kinds; the slowest in ms: {slowest}")
    # None of them cost a worker.
    assert service.service.pool.pids == before


async def test_a_template_of_the_request(service: RunningTokenizer) -> None:
    source = "<|im_start|>{{ messages[0].content }}<|im_end|>{{ mood }}{{ tools | length }}"
    request = with_template(source, template_variables_json='{"mood": "fine"}', tools_json="[{}, {}]")
    (prompt,) = (await service.stub.Render(request)).prompts
    assert prompt.text_tail == "<|im_start|>hello <|im_end|><|im_end|>fine2"
    # What the template writes are control tokens; what the message says is not.
    assert [index for index in prompt.token_ids if index < len(tiny.ADDED_TOKENS)] == [1, 2]
    error = await refused(service, with_template(source, template_variables_json='{"tokenize": true}'))
    assert error.param == "chat_template_kwargs.tokenize"


async def test_the_contracts_own_checks(run_dir: Path) -> None:
    """What the gateway refuses is refused here too: it is not the only client."""
    text = [pb.ContentPart(text="x")]
    call = pb.ToolCall(id="c", name="f", arguments="{}")
    user = pb.ChatMessage(role="user", content=text)
    cases: list[tuple[pb.ChatInput, str]] = [
        (pb.ChatInput(messages=[user], continue_final_message=True, add_generation_prompt=True), "continue_"),
        (
            pb.ChatInput(messages=[pb.ChatMessage(role="user", content=text, tool_calls=[call])]),
            "messages[0]",
        ),
        (pb.ChatInput(messages=[pb.ChatMessage(role="user", content=text, reasoning="x")]), "messages[0]"),
        (pb.ChatInput(messages=[pb.ChatMessage(role="user", content=text, tool_call_id="c")]), "messages[0]"),
        (pb.ChatInput(messages=[pb.ChatMessage(role="assistant", tool_calls=[call] * 3)]), "messages"),
        (pb.ChatInput(messages=[user], tools_json="[" + " " * 2000 + "]"), "tools"),
        (pb.ChatInput(messages=[user], documents_json="x" * 2000), "documents"),
        (pb.ChatInput(messages=[user], template_variables_json='{"messages": []}'), "chat_template_kwargs"),
    ]
    async with running_tokenizer(run_dir, max_tool_calls=2, max_text_bytes=1000) as running:
        for source in ("{{ 1 }}", HOSTILE["a huge range"], "tool_use"):
            error = await refused(running, with_template(source))
            assert (error.code, error.param) == (common_pb2.ERROR_CODE_UNSUPPORTED, "chat_template")
        # A model's own may be named, allowed or not.
        assert (await running.stub.Render(with_template("default"))).prompts
        (digest,) = (await running.stub.ListTokenizers(pb.ListTokenizersRequest())).tokenizers
        assert (digest.model, digest.has_chat_template) == (MODEL, True)
        for chat, param in cases:
            error = await refused(running, pb.RenderRequest(model=MODEL, chat=chat))
            assert error.code == INVALID
            assert error.param.startswith(param)
        request = pb.RenderRequest(model=MODEL, chat=pb.ChatInput(messages=[user]), truncate_to=0)
        assert (await refused(running, request)).param == "truncate_prompt_tokens"
        request.truncate_to = 2
        whole = (await running.stub.Render(chat_request(("user", "x")))).prompts[0].token_ids
        assert (await running.stub.Render(request)).prompts[0].token_ids == whole[-2:]
