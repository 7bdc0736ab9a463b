"""The `openai` package against the whole stack with the real model in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI
from openai.types import CompletionUsage

from tests.support.e2e_stack import ProcessStack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Name the capital of France."
THREADS = 8
TOKENS = 16


@pytest.fixture
def client(stack: ProcessStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def chat(client: OpenAI, text: str = QUESTION, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    return client.chat.completions.create(**(fields | options))


def complete(client: OpenAI, prompt: Any = "The capital of France is", **options: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
    return client.completions.create(**(fields | options))


def text_of(choice: Any) -> str:
    return str(choice.message.content if hasattr(choice, "message") else choice.text)


def counts(usage: CompletionUsage) -> tuple[int, int, int]:
    """Its counters, but for cached tokens: a prompt that is sent again is cached."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def streamed(
    ask: Callable[..., Any], *args: Any, **options: Any
) -> tuple[dict[int, str], dict[int, str], CompletionUsage]:
    """Texts and finish reasons by choice, and the usage, which comes once, in the last chunk."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usages: list[CompletionUsage] = []
    for chunk in ask(*args, stream=True, stream_options={"include_usage": True}, **options):
        assert not usages, "the usage chunk is the last one"
        if chunk.usage is not None:
            usages.append(chunk.usage)
            assert chunk.choices == []
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing follows a finish reason"
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    (usage,) = usages
    return texts, reasons, usage


def test_models(client: OpenAI) -> None:
    # The other one makes embeddings.
    model, _ = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    assert model.model_dump()["max_model_len"] == 2048


@pytest.mark.parametrize("ask", [chat, complete])
def test_paris(client: OpenAI, ask: Callable[..., Any], reference: Reference) -> None:
    answer = ask(client)
    texts, reasons, usage = streamed(ask, client)
    (choice,) = answer.choices
    assert "Paris" in text_of(choice)
    assert texts == {0: text_of(choice)}
    assert reasons == {0: choice.finish_reason}
    assert counts(usage) == counts(answer.usage)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    prompt = (
        reference.chat(QUESTION) if ask is chat else reference.tokenizer.encode("The capital of France is")
    )
    expected = reference.greedy(prompt, TOKENS)
    assert text_of(choice) == reference.text(expected)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected))
    ended = expected[-1] == reference.tokenizer.eos_token_id
    assert choice.finish_reason == ("stop" if ended else "length")


def test_eight_threads_at_once(client: OpenAI) -> None:
    def work(number: int) -> tuple[str, str, str, str]:
        question = f"What is {number} plus {number}?"
        prompt = f"Chapter {number}: the"
        return (
            text_of(chat(client, question, max_tokens=8).choices[0]),
            streamed(chat, client, question, max_tokens=8)[0][0],
            text_of(complete(client, prompt, max_tokens=6).choices[0]),
            streamed(complete, client, prompt, max_tokens=6)[0][0],
        )

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(work, range(1, THREADS + 1)))
    for chat_text, chat_stream, text, stream in answers:
        assert chat_text == chat_stream != ""
        assert text == stream != ""
    assert len({answer[0] for answer in answers}) > 1


def test_two_choices(client: OpenAI) -> None:
    options = {"n": 2, "temperature": 0.8, "seed": 5}
    answer = chat(client, "Tell me a story.", **options)
    texts, reasons, usage = streamed(chat, client, "Tell me a story.", **options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    first, second = (text_of(choice) for choice in answer.choices)
    assert first != second
    assert texts == {0: first, 1: second}
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}
    assert counts(usage) == counts(answer.usage)
    assert usage.completion_tokens > TOKENS
    assert usage.prompt_tokens == chat(client, "Tell me a story.", max_tokens=1).usage.prompt_tokens


def test_chat_logprobs_equal_those_of_the_reference(client: OpenAI, reference: Reference) -> None:
    choice = chat(client, "Write one line about the sea.", logprobs=True, top_logprobs=5).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == text_of(choice)
    ids = reference.ids(bytes(entry.bytes) for entry in content)
    (logits,) = reference.logits([(reference.chat("Write one line about the sea."), ids)])
    scores = logits.log_softmax(-1)
    best = scores.topk(5, dim=-1)
    for position, entry in enumerate(content):
        assert entry.logprob == pytest.approx(float(scores[position, ids[position]]), abs=1e-3)
        top = entry.top_logprobs
        assert [other.logprob for other in top] == pytest.approx(best.values[position].tolist(), abs=1e-3)
        # Greedy: the sampled token is the best one.
        assert (top[0].bytes, top[0].logprob) == (entry.bytes, entry.logprob)


def test_completion_logprobs(client: OpenAI) -> None:
    plain = complete(client)
    choice = complete(client, logprobs=3).choices[0]
    columns = choice.logprobs
    assert choice.text == plain.choices[0].text
    assert "".join(columns.tokens) == choice.text
    assert len(columns.tokens) == len(columns.token_logprobs) == plain.usage.completion_tokens
    for offset, token in zip(columns.text_offset, columns.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    for token, value, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        assert value <= 0
        assert top[token] == value == max(top.values())
    pieces: list[str] = []
    for chunk in complete(client, logprobs=3, stream=True):
        pieces += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert pieces == columns.tokens


def test_stop_strings(client: OpenAI) -> None:
    whole = text_of(complete(client).choices[0])
    # In the middle of words, so that the cut is inside of tokens.
    stop = whole[9:13]
    expected = whole[: whole.index(stop)]
    answer = complete(client, stop=[stop, "never said"])
    texts, reasons, usage = streamed(complete, client, stop=stop)
    assert text_of(answer.choices[0]) == expected
    assert answer.choices[0].finish_reason == "stop"
    assert (texts, reasons) == ({0: expected}, {0: "stop"})
    assert counts(usage) == counts(answer.usage)
    assert 0 < usage.completion_tokens < TOKENS
    assert text_of(complete(client, stop=["never said"]).choices[0]) == whole


@pytest.mark.long
def test_seeds_alone_and_in_company(client: OpenAI) -> None:
    def draw(seed: int) -> str:
        return text_of(chat(client, "Invent a word.", seed=seed, temperature=0.9).choices[0])

    alone = [draw(123) for _ in range(3)]
    assert len(set(alone)) == 1
    with ThreadPoolExecutor(THREADS + 1) as pool:
        others = [pool.submit(draw, seed) for seed in range(THREADS)]
        among = pool.submit(draw, 123)
        crowd = {other.result() for other in others}
    assert among.result() == alone[0]
    assert len(crowd) > THREADS // 2


def test_a_prompt_of_token_ids(client: OpenAI, reference: Reference) -> None:
    prompt = "The capital of France is"
    ids = reference.tokenizer.encode(prompt)
    text = complete(client, prompt)
    assert text_of(complete(client, ids).choices[0]) == text_of(text.choices[0])
    two = complete(client, [ids, ids])
    assert [text_of(choice) for choice in two.choices] == [text_of(text.choices[0])] * 2
    assert two.usage.prompt_tokens == 2 * len(ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "error", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"top_p": 1.1}, openai.BadRequestError, "invalid_value", "top_p"),
        ({"n": 0}, openai.BadRequestError, "invalid_value", "n"),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_value", "max_tokens"),
        ({"max_tokens": 4000}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "invalid_value", "stop"),
        ({"logprobs": "yes"}, openai.BadRequestError, "invalid_type", "logprobs"),
        ({"frequency_penalty": 3}, openai.BadRequestError, "invalid_value", "frequency_penalty"),
    ],
)
def test_errors(
    client: OpenAI,
    stream: bool,
    options: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str,
    param: str,
) -> None:
    with pytest.raises(error) as caught:
        chat(client, stream=stream, **options)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
