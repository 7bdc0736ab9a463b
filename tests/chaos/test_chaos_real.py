"""Engines of the real model killed under load: every request completes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from services.engine.model import prepare_model
from tests.chaos.load import Load, keep_killing, resumed
from tests.chaos.support import Say
from tests.support.e2e_stack import ProcessStack, StackPlan, running_stack
from tests.support.token_stream import TokenStream

MODEL = "SmolLM2-135M-Instruct"
START_S = 120.0
STREAMS = 4
TOKENS = 48
PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time", "The opposite of hot is")


@dataclass
class Asked:
    stream: TokenStream
    expected: str


@pytest.fixture
def real_engines() -> Iterator[ProcessStack]:
    """Two engines of the small model in float32, behind a router, a tokenizer and a gateway."""
    model = prepare_model("smollm2")
    plan = StackPlan(
        model_dir=model,
        model=MODEL,
        engines=2,
        engine_flags=(
            *("--model", str(model), "--dtype", "float32", "--kv-cache-gib", "0.5"),
            *("--max-model-len", "1024", "--device-threads", "1"),
        ),
    )
    with running_stack(lambda _: plan) as stack:
        yield stack


def ask(stack: ProcessStack, prompt: str, expected: str = "") -> Asked:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    return Asked(TokenStream(stack.address, body), expected)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_real_engines_die_every_half_minute(real_engines: ProcessStack, say: Say) -> None:
    stack = real_engines
    await stack.ready(timeout_s=START_S)
    expected = {prompt: (await ask(stack, prompt).stream.finish(60)).text for prompt in PROMPTS}
    prompts = itertools.cycle(PROMPTS)

    def next_question() -> Asked:
        prompt = next(prompts)
        return ask(stack, prompt, expected[prompt])

    load = Load(STREAMS, next_question)
    kills = await keep_killing(stack, seconds=100, every_s=30, at_least=1, of=2, rng=random.Random(7))
    await load.stop()
    say(
        f"{kills} real engines killed in 2 minutes: {load.completed} of {load.asked} requests completed, "
        f"{load.exact} exact; {await resumed(stack)} sequences resumed"
    )
    load.all_complete()
    await stack.ready(timeout_s=START_S)
    await stack.idle()
