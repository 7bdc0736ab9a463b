"""What lm-eval's `local-completions` asks for and how it reads the answer, against transformers in float32:
log likelihoods of continuations, and whether greedy decoding would have given them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.e2e_stack import ProcessStack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
CLOSE = 1e-3
CONCURRENT = 4
BATCH = 8
# Two scores nearer than this may change places with the order of a sum.
NEAR_TIE = 1e-4
CONTEXTS = (
    "The capital of France is",
    "Q: What is 17 + 25?\nA:",
    "To be, or not to be: that is",
    "def add(a, b):\n    return",
    "Zoë said: «naïve 日本 🌶»",
    "Water boils at a temperature of",
    "Once upon a time there was a",
)
CONTINUATIONS = (
    " Paris.",
    " 42",
    " the question",
    " a + b",
    " one hundred degrees Celsius",
    " little 🙂 girl",
    " not what anybody would have expected of it",
)
WORDS = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
)


@dataclass(frozen=True)
class Asked:
    """A request: ids of the context and of its continuation."""

    context: list[int]
    continuation: list[int]


def asked(reference: Reference, count: int) -> list[Asked]:
    """Different requests: short and long contexts, likely and unlikely continuations."""
    draw = random.Random(count)
    found = []
    for _ in range(count):
        lead = " ".join(draw.choices(WORDS, k=draw.choice((0, 5, 20, 100))))
        context, continuation = f"{lead} {draw.choice(CONTEXTS)}", draw.choice(CONTINUATIONS)
        found.append(Asked(*(reference.tokenizer.encode(text) for text in (context, continuation))))
    # A continuation that greedy decoding gives.
    found[0] = Asked(found[0].context, reference.greedy(found[0].context, 6))
    return found


def answers(client: httpx.Client, requests: Sequence[Asked], batch_size: int) -> list[tuple[float, bool]]:
    """Log likelihoods and greediness, in the order of the requests."""

    def ask(batch: Sequence[Asked]) -> list[tuple[float, bool]]:
        body = {
            "model": MODEL,
            "prompt": [[*request.context, *request.continuation] for request in batch],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return [_read(choice, request) for choice, request in zip(choices, batch, strict=True)]

    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        return [found for part in pool.map(ask, batches) for found in part]


def _read(choice: dict[str, Any], request: Asked) -> tuple[float, bool]:
    # All but the generated token, which was not asked for.
    part = slice(len(request.context), -1)
    values = choice["logprobs"]["token_logprobs"][part]
    tops = choice["logprobs"]["top_logprobs"][part]
    assert len(values) == len(request.continuation)
    greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), greedy


def compare(client: httpx.Client, reference: Reference, count: int, batch_size: int) -> float:
    """The largest difference of a log likelihood; whether it is greedy must be the same but for near ties."""
    requests = asked(reference, count)
    found = answers(client, requests, batch_size)
    largest = 0.0
    # Neighbours of one length, so that little is filled up.
    order = sorted(range(count), key=lambda index: len(requests[index].context))
    for start in range(0, count, BATCH):
        part = order[start : start + BATCH]
        pairs = [(requests[index].context, requests[index].continuation) for index in part]
        for index, scores in zip(part, reference.logits(pairs), strict=True):
            tokens, (total, greedy) = requests[index].continuation, found[index]
            picked = scores[range(len(tokens)), tokens]
            expected = float((picked - scores.logsumexp(-1)).sum())
            largest = max(largest, abs(total - expected))
            margin = float((scores.topk(1, dim=-1).values[:, 0] - picked).max())
            assert greedy == (margin == 0.0) or margin < NEAR_TIE
    assert found[0][1]
    assert not all(greedy for _, greedy in found)
    return largest


@pytest.fixture
def client(stack: ProcessStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.address, timeout=120) as opened:
        yield opened


def test_a_dozen_requests(client: httpx.Client, reference: Reference) -> None:
    assert compare(client, reference, 12, batch_size=1) < CLOSE


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 8])
def test_two_hundred_requests(
    client: httpx.Client,
    reference: Reference,
    batch_size: int,
    record_property: Callable[[str, object], None],
) -> None:
    largest = compare(client, reference, 200, batch_size)
    record_property("largest_difference", largest)
    assert largest < CLOSE
