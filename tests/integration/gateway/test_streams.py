"""Answers byte by byte: chat and completions, streamed and whole."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from catenary.seeds import derive_seed
from tests.support.gateway import CHAT, Stack, saying, script
from tests.support.specs import expected_tokens
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import EOS_ID, THINK_ID, byte_ids

USER = [{"role": "user", "content": "hi"}]


def pinned(body: bytes) -> str:
    """A stream without what differs from run to run; the ids and times must be the same in all events."""
    text = body.decode()
    assert len(set(re.findall(r'"id":"[^"]+"', text))) == 1
    assert len(set(re.findall(r'"created":\d+', text))) == 1
    return re.sub(
        r'"created":\d+', '"created":0', re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1"', text)
    )


def chat_event(choices: str, usage: str = "") -> str:
    head = '{"id":"chatcmpl","object":"chat.completion.chunk","created":0,"model":"tiny","choices":'
    return f"data: {head}{choices}{usage}}}\n\n"


def choice(delta: str, finish: str = "null", index: int = 0) -> str:
    reason = "" if finish == "null" else ',"stop_reason":null'
    return f'[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{finish}{reason}}}]'


def texts(events: list[Any], index: int = 0) -> list[str]:
    found = []
    for event in events[:-1]:
        for item in event["choices"]:
            if item["index"] == index:
                found.append(item["text"] if "text" in item else item["delta"].get("content", ""))
    return found


async def test_a_chat_stream_byte_by_byte(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("Yes"), step_delay_ms=30))
    answer = await stack.post(CHAT, {"messages": USER, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    assert pinned(answer.body) == "".join(
        [
            chat_event(choice('{"role":"assistant","content":""}')),
            *(chat_event(choice(f'{{"content":"{char}"}}')) for char in "Yes"),
            chat_event(choice("{}", '"stop"')),
            "data: [DONE]\n\n",
        ]
    )


async def test_a_chat_stream_with_usage_byte_by_byte(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("No"), step_delay_ms=30))
    answer = await stack.post(
        CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    )
    prompt = json.loads((await stack.chat()).body)["usage"]["prompt_tokens"]
    usage = (
        f',"usage":{{"prompt_tokens":{prompt},"completion_tokens":2,"total_tokens":{prompt + 2},'
        '"prompt_tokens_details":{"cached_tokens":0}}'
    )
    absent = ',"usage":null'
    assert pinned(answer.body) == "".join(
        [
            chat_event(choice('{"role":"assistant","content":""}'), absent),
            chat_event(choice('{"content":"N"}'), absent),
            chat_event(choice('{"content":"o"}'), absent),
            chat_event(choice("{}", '"length"'), absent),
            chat_event("[]", usage),
            "data: [DONE]\n\n",
        ]
    )


async def test_a_whole_chat_byte_by_byte(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("Yes")))
    answer = await stack.chat()
    body = json.loads(answer.body)
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body.pop("id"))
    prompt = body["usage"]["prompt_tokens"]
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Yes", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 4,
            "total_tokens": prompt + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_completion_stream_byte_by_byte(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("ok"), step_delay_ms=30))
    answer = await stack.complete(stream=True)
    head = '{"id":"cmpl","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":'
    assert pinned(answer.body) == "".join(
        [
            f'data: {head}"o","logprobs":null,"finish_reason":null}}]}}\n\n',
            f'data: {head}"k","logprobs":null,"finish_reason":null}}]}}\n\n',
            f'data: {head}"","logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n',
            "data: [DONE]\n\n",
        ]
    )


@pytest.mark.parametrize("n", [1, 3])
async def test_streams_add_up_to_the_whole_answer(stack: Stack, n: int) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 40,
        "n": n,
        "seed": 11,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = (await stack.chat(**fields)).json()
    events = (await stack.chat(**fields, stream=True, stream_options={"include_usage": True})).events
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole["usage"]
    assert [event["choices"] for event in events[:-1] if not event["choices"]] == [[]]
    for index, expected in enumerate(whole["choices"]):
        mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert mine[-1]["delta"] == {}
        assert "".join(texts(events, index)) == expected["message"]["content"]
        entries = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == expected["logprobs"]["content"]
        assert len(entries) == 40
        assert (
            bytes(b for entry in entries for b in entry["bytes"]).decode() == expected["message"]["content"]
        )
    assert len({c["message"]["content"] for c in whole["choices"]}) == n


async def test_n_samples_are_those_of_derived_seeds(stack: Stack) -> None:
    tiny = script()
    prompt = byte_ids("x!")
    answer = await stack.complete(prompt, n=2, seed=5, max_tokens=6)
    for index, item in enumerate(answer.json()["choices"]):
        ids = expected_tokens(prompt, 6, seed=derive_seed(5, index), script=tiny)
        vocabulary = stack.gateway.upstreams.models.require("tiny").vocabulary
        assert item["text"] == vocabulary.decode(ids)
    alone = await stack.complete(prompt, seed=5, max_tokens=6)
    assert alone.json()["choices"][0]["text"] == vocabulary.decode(
        expected_tokens(prompt, 6, seed=5, script=tiny)
    )


async def test_prompts_times_n_are_indexed_prompt_first(stack: Stack) -> None:
    fields = {"n": 2, "seed": 5, "max_tokens": 4}
    both = (await stack.complete(["ab", "xy"], **fields)).json()
    first, second = [(await stack.complete(p, **fields)).json() for p in ("ab", "xy")]
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"]] == [c["text"] for c in first["choices"] + second["choices"]]
    assert (
        both["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]
    )
    assert both["usage"]["completion_tokens"] == 16


async def test_all_forms_of_a_prompt_agree(stack: Stack) -> None:
    ids = [7, 8, 300]
    text = " a b" + chr(300 - 256)
    answers = [await stack.complete(p, seed=1) for p in (ids, [ids], text, [text])]
    assert len({a.json()["choices"][0]["text"] for a in answers}) == 1
    assert all(a.json()["usage"]["completion_tokens"] == 16 for a in answers)


async def test_usage_so_far_in_every_chunk(start_stack: StartStack) -> None:
    tokens = [*byte_ids("a"), *byte_ids("é"), *byte_ids("🌶"), THINK_ID, 0, 1]
    stack = await start_stack(script(saying(tokens, then="hash"), step_delay_ms=5))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await stack.chat(stream=True, max_tokens=10, stream_options=options)).events[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert (await stack.chat(max_tokens=10)).json()["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_sequence_in_the_engine(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(saying("one STOP two three"), step_delay_ms=20))
    answer = await stack.complete(stop=["STOP"], stream=stream, max_tokens=500, stream_options=None)
    if stream:
        assert "".join(texts(answer.events)) == "one "
        assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        body = answer.json()
        assert body["choices"][0]["text"] == "one "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 8
    await stack.idle()


async def test_line_separators_do_not_break_events(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("a\u2028b\u2029c\u0085d\r\ne")))
    answer = await stack.chat(stream=True)
    assert "".join(texts(answer.events)) == "a\u2028b\u2029c\u0085d\r\ne"
    assert all(char not in answer.body.decode() for char in "\u2028\u2029\u0085\r")


async def test_stop_tokens_and_the_end_of_sequence(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying([*byte_ids("ab"), EOS_ID, *byte_ids("cd")])))
    plain = (await stack.complete(max_tokens=5)).json()
    assert (plain["choices"][0]["text"], plain["usage"]["completion_tokens"]) == ("ab", 3)
    ignoring = (await stack.complete(max_tokens=5, ignore_eos=True)).json()
    assert (ignoring["choices"][0]["text"], ignoring["choices"][0]["finish_reason"]) == ("abcd", "length")
    stopped = (await stack.complete(max_tokens=5, stop_token_ids=byte_ids("b"), logprobs=0)).json()
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("a", "stop")
    assert stopped["usage"]["completion_tokens"] == 2
    assert stopped["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert stopped["choices"][0]["stop_reason"] == byte_ids("b")[0]


async def test_the_context_is_the_default_limit_of_a_chat(start_stack: StartStack) -> None:
    stack = await start_stack(script(model={"max_model_len": 64}))
    body = (await stack.chat()).json()
    assert body["usage"]["total_tokens"] == 64
    assert body["choices"][0]["finish_reason"] == "length"


async def test_no_seed_means_a_fresh_one(stack: Stack) -> None:
    answers = {(await stack.complete("x", temperature=1)).json()["choices"][0]["text"] for _ in range(4)}
    assert len(answers) > 1
    two = (await stack.complete(["x", "x"], temperature=1)).json()["choices"]
    assert two[0]["text"] != two[1]["text"]


async def test_models(stack: Stack) -> None:
    listed = (await stack.get("/v1/models")).json()
    assert listed["object"] == "list"
    (tiny,) = listed["data"]
    assert tiny.pop("created") > 0
    assert tiny == {
        "id": "tiny",
        "object": "model",
        "owned_by": "catenary",
        "root": "tiny",
        "parent": None,
        "max_model_len": 1024,
        "tasks": ["generate"],
    }
    assert (await stack.get("/v1/models/tiny")).json()["id"] == "tiny"
    for name in ("nope", "org/nope", "tiny//", "..%2f..%2fetc"):
        answer = await stack.get(f"/v1/models/{name}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_openapi_describes_the_requests(stack: Stack) -> None:
    document = (await stack.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.removeprefix("#/components/schemas/")]
    assert set(schema["required"]) == {"messages"}
    assert {"temperature", "stop", "logprobs", "seed"} <= set(schema["properties"])


async def test_metrics_have_exact_values_and_both_names(stack: Stack) -> None:
    for _ in range(3):
        await stack.complete([7, 8], max_tokens=5, n=2)
    await stack.complete([7], max_tokens=4, stream=True)
    page = (await stack.get("/metrics")).body.decode()
    for prefix in ("catenary_", "vllm:"):
        for line in (
            'prompt_tokens_total{model_name="tiny"} 7.0',
            'generation_tokens_total{model_name="tiny"} 34.0',
            'request_success_total{finished_reason="length",model_name="tiny"} 7.0',
            'time_to_first_token_seconds_count{model_name="tiny"} 4.0',
            'e2e_request_latency_seconds_count{model_name="tiny"} 4.0',
            'request_prompt_tokens_sum{model_name="tiny"} 7.0',
            'request_generation_tokens_sum{model_name="tiny"} 34.0',
            'num_requests_running{model_name="tiny"} 0.0',
            'num_requests_waiting{model_name="tiny"} 0.0',
            'kv_cache_usage_perc{model_name="tiny"} 0.0',
        ):
            assert f"\n{prefix}{line}\n" in page, line
    # Per token, and under the name that it had before: 6 choices of 5 tokens and one of 4.
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert f'\n{name}_count{{model_name="tiny"}} 27.0\n' in page
    # Once per request.
    for prefix in ("catenary_", "vllm:"):
        assert f'\n{prefix}request_time_per_output_token_seconds_count{{model_name="tiny"}} 4.0\n' in page
    assert '\nvllm:gpu_cache_usage_perc{model_name="tiny"} 0.0\n' in page
