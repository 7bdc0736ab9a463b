"""Further parameters through the `openai` package, against the real model in float32 and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI

from tests.support.at_once import at_once
from tests.support.e2e_stack import ProcessStack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
LAUGHTER = "ha ha ha ha ha ha ha ha ha ha ha ha"
CONTEXTS = [
    ("The sky is", " blue and the grass is green."),
    ("\n1. Carol", " went to the market, Zoë did not 🌶."),
    ("Water boils at a temperature of about", " one hundred degrees"),
    ("To be, or not to be:", " that is the question"),
]


@pytest.fixture
def client(stack: ProcessStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def complete(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    extra = {
        name: options.pop(name)
        for name in list(options)
        if name not in ("n", "best_of", "logprobs", "echo", "seed", "stop", "stream", "logit_bias")
        and not name.endswith(("_penalty", "tokens", "temperature"))
    }
    for name in ("min_tokens", "truncate_prompt_tokens", "repetition_penalty"):
        if name in options:
            extra[name] = options.pop(name)
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8}
    return client.completions.create(**(fields | options), extra_body=extra)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].text)


def test_log_likelihoods_as_lm_eval_asks_for_them(client: OpenAI, reference: Reference) -> None:
    pairs = [
        (reference.tokenizer.encode(context), reference.tokenizer.encode(continuation))
        for context, continuation in CONTEXTS
    ]
    answer = complete(
        client, [[*context, *rest] for context, rest in pairs], echo=True, logprobs=1, max_tokens=1, seed=1
    )
    assert [choice.index for choice in answer.choices] == list(range(len(pairs)))
    again = complete(
        client, [[*context, *rest] for context, rest in pairs], echo=True, logprobs=1, max_tokens=0
    )
    for choice, alone, (context, rest), words in zip(
        answer.choices, again.choices, pairs, CONTEXTS, strict=True
    ):
        (logits,) = reference.logits([(context, rest)])
        scores = logits.log_softmax(-1)
        expected = [float(scores[place, token_id]) for place, token_id in enumerate(rest)]
        # lm-eval drops the one generated token from the end.
        values = choice.logprobs.token_logprobs[len(context) : -1]
        assert values == pytest.approx(expected, abs=1e-3)
        assert choice.logprobs.token_logprobs[0] is None
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        names = choice.logprobs.tokens[len(context) : -1]
        best = [max(top, key=top.get) == name for top, name in zip(tops, names, strict=True)]
        ids = scores.argmax(-1).tolist()
        assert best == [token_id == one for token_id, one in zip(ids, rest, strict=True)]
        assert alone.text == "".join(words)
        assert alone.logprobs.token_logprobs[len(context) :] == pytest.approx(expected, abs=1e-3)
        assert alone.finish_reason == "length"
        whole = choice.text
        assert all(0 <= offset <= len(whole) for offset in choice.logprobs.text_offset)


def test_bias_bans_and_allowed_tokens(client: OpenAI, reference: Reference) -> None:
    (cat,) = reference.ids([b" cat"])
    forced = complete(client, logit_bias={str(cat): 100}, max_tokens=3)
    assert text_of(forced) == " cat cat cat"
    plain = text_of(complete(client))
    first = reference.tokenizer.encode(plain)[0]
    assert text_of(complete(client, logit_bias={str(first): -100})) != plain
    assert text_of(complete(client, allowed_token_ids=[cat], max_tokens=2)) == " cat cat"
    assert "Paris" in plain
    without = text_of(complete(client, bad_words=["Paris"], max_tokens=12))
    assert "Paris" not in without
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, logit_bias={"999999": 1})
    assert caught.value.param == "logit_bias"


def test_penalties_change_an_answer_and_no_neighbour(client: OpenAI) -> None:
    laugh = partial(complete, client, LAUGHTER, max_tokens=16)
    plain = text_of(laugh())
    *changed, beside = at_once(
        partial(laugh, frequency_penalty=2),
        partial(laugh, presence_penalty=2),
        partial(laugh, repetition_penalty=2.0),
        laugh,
    )
    assert all(text_of(answer) != plain for answer in changed)
    assert text_of(beside) == plain


def test_token_ids_and_a_cut_prompt(client: OpenAI, reference: Reference) -> None:
    answer = complete(client, return_token_ids=True)
    choice = answer.choices[0].model_dump()
    assert choice["prompt_token_ids"] == reference.tokenizer.encode(PROMPT)
    assert reference.text(choice["token_ids"]) == choice["text"]
    assert len(choice["token_ids"]) == answer.usage.completion_tokens
    cut = complete(client, truncate_prompt_tokens=3, return_token_ids=True)
    assert cut.choices[0].model_dump()["prompt_token_ids"] == reference.tokenizer.encode(PROMPT)[-3:]
    assert cut.usage.prompt_tokens == 3


def test_the_best_of_several(client: OpenAI) -> None:
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    every = complete(client, n=4, logprobs=0, **options)
    means = [
        sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) for choice in every.choices
    ]
    best = complete(client, best_of=4, **options)
    assert text_of(best) == every.choices[means.index(max(means))].text
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.usage.prompt_tokens == every.usage.prompt_tokens


def test_stop_reasons_and_shown_stops(client: OpenAI) -> None:
    plain = text_of(complete(client))
    stopped = complete(client, stop=[plain[2:4]], include_stop_str_in_output=True)
    assert text_of(stopped) == plain[: plain.index(plain[2:4]) + 2]
    assert stopped.choices[0].stop_reason == plain[2:4]
    assert complete(client).choices[0].stop_reason is None


def test_streams_add_up_whatever_is_asked_for(client: OpenAI, reference: Reference) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    asked = partial(complete, client, logprobs=2, n=2, echo=True)
    *answers, chunks = at_once(
        *(partial(asked, prompt) for prompt in (PROMPT, [PROMPT], ids)), lambda: list(asked(ids, stream=True))
    )
    texts = [[choice.text for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1] == texts[2]
    columns = answers[0].choices[1].logprobs
    pieces: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    joined, reasons = ["", ""], [0, 0]
    for chunk in chunks:
        for choice in chunk.choices:
            joined[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason is not None
            if choice.index == 1 and choice.logprobs is not None:
                for name, values in pieces.items():
                    values += getattr(choice.logprobs, name)
    assert joined == texts[0]
    assert reasons == [1, 1]
    assert {name: getattr(columns, name) for name in pieces} == pieces
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        complete(client, [999999])


def test_chat_log_probabilities_streamed_and_whole(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say: né🌶 STOP now"}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["o"],
    }
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == choice.message.content
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices:
            streamed += (part.logprobs.content or []) if part.logprobs else []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in content]
