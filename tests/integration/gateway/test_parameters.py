"""Parameters through a whole stack of scripted engine, router and gateway, exact to the byte."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from catenary.v1 import common_pb2
from catenary_testing.engine import best_alternatives, sampled_logprob
from gateway.link.failover import FailoverSession
from tests.support.answers import choices_of, joined
from tests.support.batches import COMPLETIONS, ended, line, results, started
from tests.support.gateway import CHAT, Stack, saying, script
from tests.support.http import Answer
from tests.support.responses import RESPONSES, events_of
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import IM_START_ID, VOCAB_SIZE, byte_id, byte_ids

STREAM = pytest.mark.parametrize("stream", [False, True])
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def logprobs_of(answer: Answer, index: int = 0) -> dict[str, list[Any]]:
    """The four arrays of a completion's choice, of all its chunks."""
    found = [c["logprobs"] for c in choices_of(answer) if c["index"] == index and c["logprobs"]]
    return {name: [item for part in found for item in part[name] or []] for name in NAMES}


def last(answer: Answer, index: int = 0) -> dict[str, Any]:
    return [choice for choice in choices_of(answer) if choice["index"] == index][-1]


@STREAM
async def test_an_echo_is_one_text_with_its_choice(start_stack: StartStack, stream: bool) -> None:
    pepper = [byte_id(byte) for byte in "🌶".encode()]
    prompt = [IM_START_ID, *byte_ids("né"), *pepper[:2]]
    stack = await start_stack(script(saying([*pepper[2:], *byte_ids("ok")], prompt), step_delay_ms=5))
    answer = await stack.complete(prompt, echo=True, logprobs=1, max_tokens=4, stream=stream)
    assert joined(answer) == ("né🌶ok", "length")
    found = logprobs_of(answer)
    assert found["tokens"] == [
        "<|im_start|>", "n", "bytes:\\xc3", "bytes:\\xa9",
        "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8c", "bytes:\\xb6", "o", "k",
    ]  # fmt: skip
    assert found["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 4]
    ids = [*prompt, *pepper[2:], *byte_ids("ok")]
    values = [sampled_logprob(token_id, place) for place, token_id in enumerate(ids)]
    assert found["token_logprobs"] == [None, *values[1:]]
    assert found["top_logprobs"][0] is None
    assert [list(top.values()) for top in found["top_logprobs"][1:]] == [[value] for value in values[1:]]


@STREAM
async def test_a_prompt_alone(stack: Stack, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await stack.complete(
        ["ab", "xyz"], echo=True, logprobs=0, max_tokens=0, n=2, stream=stream, **options
    )
    assert [joined(answer, index) for index in range(4)] == [("ab", "length")] * 2 + [("xyz", "length")] * 2
    for index, text in enumerate(("ab", "ab", "xyz", "xyz")):
        found = logprobs_of(answer, index)
        assert found["tokens"] == list(text)
        assert found["token_logprobs"][0] is None
        assert found["text_offset"] == list(range(len(text)))
    usage = answer.events[-2]["usage"] if stream else answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)
    bare = (await stack.complete("ab", prompt_logprobs=0, max_tokens=0)).json()["choices"][0]
    assert (bare["text"], bare["finish_reason"], len(bare["prompt_logprobs"])) == ("", "length", 2)


async def test_a_long_echo(start_stack: StartStack) -> None:
    stack = await start_stack(script(model={"max_model_len": 8192}))
    text = "all work and no play " * 250
    streamed = await stack.complete(text, echo=True, logprobs=0, max_tokens=1, n=2, seed=1, stream=True)
    answer = await stack.complete(text, echo=True, logprobs=0, max_tokens=1, n=2, seed=1)
    for index in range(2):
        assert joined(streamed, index) == joined(answer, index)
        assert logprobs_of(streamed, index) == logprobs_of(answer, index)
        assert joined(answer, index)[0].startswith(text)
        assert "".join(logprobs_of(answer, index)["tokens"]) == joined(answer, index)[0]


async def test_what_an_answer_tells_of_prompts_is_limited(start_stack: StartStack) -> None:
    stack = await start_stack(max_scored_prompt_tokens=6)
    for fields, param in (
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ):
        assert (await stack.complete(["xyz"], n=2, max_tokens=1, **fields)).status == 200
        answer = await stack.complete(["xyz", "x"], n=2, max_tokens=1, **fields)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert (await stack.complete(["xyz", "x"], n=2, max_tokens=1, echo=True)).status == 200


async def test_log_probabilities_of_a_prompt_have_the_shape_of_vllm(stack: Stack) -> None:
    prompt = byte_ids("abc")
    (choice,) = (await stack.complete(prompt, prompt_logprobs=2, max_tokens=1)).json()["choices"]
    expected: list[Any] = [None]
    for place, token_id in list(enumerate(prompt))[1:]:
        expected.append(
            {
                str(other): {"logprob": value, "rank": rank, "decoded_token": bytes([other - 256]).decode()}
                for rank, (other, value) in enumerate(
                    best_alternatives(token_id, place, 2, VOCAB_SIZE), start=1
                )
            }
        )
    assert choice["prompt_logprobs"] == expected
    bare = (await stack.complete(prompt, prompt_logprobs=0, max_tokens=1)).json()["choices"][0]
    value = sampled_logprob(prompt[1], 1)
    assert bare["prompt_logprobs"][1] == {
        str(prompt[1]): {"logprob": value, "rank": None, "decoded_token": "b"}
    }
    chat = (await stack.chat(prompt_logprobs=1, max_tokens=1)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]


@STREAM
async def test_stops_in_the_text_and_what_stopped(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(saying([*byte_ids("ab"), 255, *byte_ids("STOP!")]), step_delay_ms=5))

    async def ask(**fields: Any) -> tuple[str, str, Any]:
        answer = await stack.complete(stream=stream, **fields)
        return *joined(answer), last(answer)["stop_reason"]

    assert await ask(stop=["STOP", "TOP"]) == ("ab\n\n", "stop", "STOP")
    assert await ask(stop=["STOP"], include_stop_str_in_output=True) == ("ab\n\nSTOP", "stop", "STOP")
    assert await ask(stop=["\n"], include_stop_str_in_output=True) == ("ab\n", "stop", "\n")
    assert await ask(stop_token_ids=[255]) == ("ab", "stop", 255)
    assert await ask(stop_token_ids=[255], include_stop_str_in_output=True) == ("ab\n\n", "stop", 255)
    assert await ask(include_stop_str_in_output=True) == ("ab\n\nSTOP!", "stop", None)
    assert await ask(max_tokens=1) == ("a", "length", None)


@STREAM
async def test_special_tokens_are_hidden_or_shown(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(saying([IM_START_ID, *byte_ids("a")])))

    async def ask(**fields: Any) -> str:
        return joined(await stack.complete(stream=stream, **fields))[0]

    assert await ask() == "a"
    for fields in ({"skip_special_tokens": False}, {"keep_special_tokens": True}):
        assert await ask(**fields) == "<|im_start|>a"
        assert await ask(**fields, include_stop_str_in_output=True) == "<|im_start|>a<|im_end|>"
    echoed = await stack.complete([IM_START_ID, *byte_ids("x")], echo=True, skip_special_tokens=False)
    assert joined(echoed)[0] == "<|im_start|>x<|im_start|>a"
    entries = (await stack.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in entries] == [("<|im_start|>", None), ("a", [97])]
    assert entries[0]["top_logprobs"][0]["bytes"] is None


@pytest.mark.parametrize("field", [{"skip_special_tokens": False}, {"keep_special_tokens": True}])
async def test_special_tokens_are_shown_on_every_route(
    start_stack: StartStack, field: dict[str, bool]
) -> None:
    stack = await start_stack(script(saying([IM_START_ID, *byte_ids("a")])), batch_model_wait_s=0.5)
    shown = "<|im_start|>a"
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **field}
    text: dict[str, Any] = {"prompt": "x", **field}
    for stream in (False, True):
        assert joined(await stack.post(CHAT, {**chat, "stream": stream}))[0] == shown
        for url in (COMPLETIONS, "/invocations"):
            assert joined(await stack.post(url, {**text, "stream": stream}))[0] == shown
        assert joined(await stack.post("/invocations", {**chat, "stream": stream}))[0] == shown
    response: dict[str, Any] = {"input": "x", **field}
    made = (await stack.post(RESPONSES, response)).json()
    assert made["output"][0]["content"][0]["text"] == shown
    events = events_of(await stack.post(RESPONSES, {**response, "stream": True}))
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == shown
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        for url, body in ((CHAT, chat), (COMPLETIONS, text), (RESPONSES, response)):
            batch = await ended(client, await started(client, [line("a", body, url)], url))
            (answer,) = (await results(client, batch.output_file_id)).values()
            assert shown in json.dumps(answer)


@STREAM
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_token_ids_of_prompt_and_answer(start_stack: StartStack, path: str, stream: bool) -> None:
    said = [*byte_ids("hé"), IM_START_ID, *byte_ids("STOPx")]
    stack = await start_stack(script(saying(said), step_delay_ms=5))
    send = stack.chat if path == "chat" else stack.complete
    answer = await send("ab", return_token_ids=True, n=2, stop="STOP", stream=stream)
    for index in range(2):
        mine = [c for c in choices_of(answer) if c["index"] == index]
        assert [i for c in mine for i in c.get("token_ids", ())] == said[:-1]
    if path == "completions":
        prompts = [c["prompt_token_ids"] for c in choices_of(answer) if "prompt_token_ids" in c]
        assert prompts == [byte_ids("ab")] * 2
    elif stream:
        told = [event["prompt_token_ids"] for event in answer.events[:-1] if "prompt_token_ids" in event]
        assert len(told) == 2
        assert all(ids[0] == IM_START_ID for ids in told)
    else:
        body = answer.json()
        assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert "token_ids" not in last(await send("ab", stream=stream))


async def test_tokens_named_by_their_ids(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("ab")))
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    a, b = (f"token_id:{token_id}" for token_id in byte_ids("ab"))
    found = logprobs_of(await stack.complete(logprobs=1, **fields))
    assert found["tokens"] == [a, b]
    assert [list(top) for top in found["top_logprobs"]] == [[a], [b]]
    entries = (await stack.chat(logprobs=True, **fields)).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in entries] == [(a, [97]), (b, [98])]


async def test_the_most_probable_samples_are_answered(stack: Stack) -> None:
    fields = {"max_tokens": 6, "seed": 5, "ignore_eos": True}
    every = await stack.complete(["one", "two"], n=4, logprobs=0, **fields)
    best = await stack.complete(["one", "two"], n=2, best_of=4, **fields)
    assert [choice["index"] for choice in choices_of(best)] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in choices_of(best))
    assert best.json()["usage"] == every.json()["usage"]
    for place in range(2):
        indexes = range(4 * place, 4 * place + 4)
        means = {index: sum(logprobs_of(every, index)["token_logprobs"]) for index in indexes}
        ranked = sorted(indexes, key=lambda index: -means[index])
        assert [joined(best, 2 * place + i) for i in range(2)] == [joined(every, i) for i in ranked[:2]]


async def test_priorities_and_hints_reach_the_router(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[common_pb2.SequenceSpec, int | None]] = []
    submit = FailoverSession.submit

    def spy(session: Any, spec: common_pb2.SequenceSpec, feed: Any, same: int | None = None) -> int:
        sent.append((spec, same))
        return submit(session, spec, feed, same)

    monkeypatch.setattr(FailoverSession, "submit", spy)
    answer = await stack.complete(["a", "b"], n=2, max_tokens=1, service_tier="priority")
    assert answer.json()["service_tier"] == "priority"
    assert [spec.priority for spec, _ in sent] == [-10] * 4
    hints = [same for _, same in sent]
    assert hints[0] is hints[2] is None
    assert hints[1] is not None
    assert hints[3] == hints[1] + 2
    flex = await stack.chat(service_tier="flex", stream=True, max_tokens=1)
    assert {event["service_tier"] for event in flex.events[:-1]} == {"flex"}
    assert sent[-1][0].priority == 10
    await stack.chat(priority=7, max_tokens=1)
    assert sent[-1][0].priority == 7
    assert "service_tier" not in (await stack.chat(max_tokens=1)).json()


@STREAM
async def test_prompts_are_cut_only_on_demand(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(model={"max_model_len": 64}))

    async def prompt_tokens(prompt: Any, **fields: Any) -> int:
        answer = await stack.complete(prompt, return_token_ids=True, max_tokens=4, stream=stream, **fields)
        (ids,) = [c["prompt_token_ids"] for c in choices_of(answer) if "prompt_token_ids" in c]
        if isinstance(prompt, list):
            assert ids == prompt[-len(ids) :]
        return len(ids)

    ids = [7 + number % 40 for number in range(100)]
    assert await prompt_tokens(ids, truncate_prompt_tokens=10) == 10
    assert await prompt_tokens("q" * 100, truncate_prompt_tokens=10) == 10
    assert await prompt_tokens(ids, truncate_prompt_tokens=-1) == 60
    assert await prompt_tokens(ids[:5], truncate_prompt_tokens=10) == 5
    answer = await stack.complete(ids, stream=stream)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = await stack.complete(ids, truncate_prompt_tokens=65, stream=stream)
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"
    answer = await stack.complete(ids, truncate_prompt_tokens=62, max_tokens=4, stream=stream)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_beams_are_the_choices_of_an_answer(stack: Stack, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True}
    search: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 3, "stream": stream}
    if stream:
        search["stream_options"] = {"include_usage": True}
    answer = await stack.post(CHAT, {**body, **search})
    assert answer.status == 200
    if not stream:
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        means = [sum(entry["logprob"] for entry in choice["logprobs"]["content"]) / 3 for choice in choices]
        assert means[0] >= means[1]
        assert answer.json()["usage"]["completion_tokens"] == 6
    refused = await stack.post(CHAT, {**body, **search, "n": 11, "best_of": 11})
    assert (refused.status, refused.json()["error"]["type"]) == (400, "invalid_request_error")
