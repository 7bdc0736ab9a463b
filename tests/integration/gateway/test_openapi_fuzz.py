"""Schemathesis makes requests by the OpenAPI document: no defect is found, and every answer is as the
document says, events of streams included.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from catenary_testing.engine import Script
from tests.support.batches import jsonl, line
from tests.support.conformance import Conformance
from tests.support.gateway import MODEL, running_stack, script
from tests.support.waiting import QUIET_THREAD, loop_beside_tests

EXAMPLES = 100
LONG_EXAMPLES = 2000
# The long run in parts of a minute or two.
PARTS = 12
POOLED = (
    *("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
    *("/pooling", "/v1/pooling"),
)
CLASSIFYING = ("/classify", "/v1/classify")
GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
TASKS = dict.fromkeys(POOLED, EMBED) | dict.fromkeys(CLASSIFYING, CLASSIFY)
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
# Values of fields that are hard to make up.
GOOD_BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
GOOD: dict[str, Any] = {
    **GOOD_BATCH,
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "query": "hi",
    "documents": ["a", "bc"],
    "text_1": "a",
    "text_2": ["b", "c"],
}
BATCH_LINES = jsonl([line("a", {"prompt": "x"})])


class Fuzzed:
    """Gateways of a generating, an embedding and a classifying model, in a thread of their own."""

    def __init__(self, tokenizer: str) -> None:
        self.session = requests.Session()
        self.addresses: dict[str, str] = {}
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._tokenizer = tokenizer
        self._loop = loop_beside_tests()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), name=QUIET_THREAD, daemon=True
        )
        self._thread.start()
        assert self._ready.wait(20)
        self.document: dict[str, Any] = self.session.get(f"{self.addresses[GENERATE]}/openapi.json").json()
        self.conformance = Conformance(self.document)
        self.schema = schemathesis.openapi.from_dict(self.document)
        self.ids = self._stored()

    async def _run(self) -> None:
        embeds = {"task": "embed", "embedding_width": 8, "max_model_len": 64}
        classifies = {"task": "classify", "labels": ("bad", "good"), "max_model_len": 64}
        scripts: dict[str, Script] = {
            GENERATE: script(model={"max_model_len": 128}),
            EMBED: script(model=embeds),
            CLASSIFY: script(model=classifies),
        }
        async with AsyncExitStack() as running:
            for task, played in scripts.items():
                directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="cat-")))
                made = running_stack(directory, self._tokenizer, played)
                stack = await running.enter_async_context(made)
                self.addresses[task] = stack.address
            self._ready.set()
            await self._over.wait()

    def _stored(self) -> dict[str, str]:
        """Something that is stored, by the names of path parameters."""
        base = self.addresses[GENERATE]
        form = {"purpose": "batch"}
        file = self.session.post(f"{base}/v1/files", data=form, files={"file": ("x", BATCH_LINES)}).json()
        batch: dict[str, Any] = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        body: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 2}
        return {
            "file_id": file["id"],
            "batch_id": self.session.post(f"{base}/v1/batches", json=batch).json()["id"],
            "response_id": self.session.post(f"{base}/v1/responses", json=body).json()["id"],
            "model_id": MODEL,
        }

    def operations(self) -> list[Any]:
        """All of them, as Schemathesis reads them."""
        return [result.ok() for result in self.schema.get_all_operations() if isinstance(result, Ok)]

    def required(self, operation: Any) -> set[str]:
        """The fields that a JSON body of an operation must have."""
        content = operation.definition.raw.get("requestBody", {}).get("content", {})
        schema: dict[str, Any] = content.get("application/json", {}).get("schema", {})
        # Of several forms, the first.
        schema = schema.get("anyOf", [schema])[0]
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        # Two of the names that a score's sides can have, and the input that a response hardly does without.
        wanted = {"text_1", "text_2", "input"} & schema.get("properties", {}).keys()
        return wanted | set(schema.get("required", ()))

    def send(self, case: Case[Any]) -> None:
        """Send a request; compare the answer with the document."""
        base = self.addresses[TASKS.get(case.path, GENERATE)]
        request = case.as_transport_kwargs(base_url=base)
        answer = self.session.request(**request)
        self.statuses[case.path, answer.status_code] += 1
        kind = answer.headers.get("content-type", "")
        assert answer.status_code < 500, (case.path, answer.content)
        if case.path.endswith("}") and (answer.url or "").partition("?")[0].endswith("/"):
            # The name was empty, or dots that the client removed: /v1/models/ is another route, the list.
            return
        self.conformance.check(case.method, case.path, answer.status_code, kind, answer.content)

    def close(self) -> None:
        """End everything."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        self.session.close()


@pytest.fixture(scope="module")
def fuzzed(tokenizer_target: str) -> Iterator[Fuzzed]:
    made = Fuzzed(tokenizer_target)
    try:
        yield made
    finally:
        made.close()


def test_a_little(fuzzed: Fuzzed) -> None:
    done: set[str] = set()
    for operation in fuzzed.operations():
        # Of paths that are served alike, only the first is asked everything.
        summary = operation.definition.raw["summary"]
        fuzz(fuzzed, operation, EXAMPLES // 5 if summary in done else EXAMPLES)
        done.add(summary)
    answered = {path for (path, status) in fuzzed.statuses if status == 200}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", *TASKS} <= answered


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_lot(fuzzed: Fuzzed, part: int) -> None:
    for operation in fuzzed.operations()[part::PARTS]:
        fuzz(fuzzed, operation, LONG_EXAMPLES)


def fuzz(fuzzed: Fuzzed, operation: Any, examples: int) -> None:
    """Send so many requests, half of them as the document wants them and half of them not."""
    required = fuzzed.required(operation)
    good = {**GOOD, "input_file_id": fuzzed.ids["file_id"]}

    def completed(case: Case[Any], choose: Random) -> None:
        # What is really there, or said well, leads further than what is made up.
        for name in case.path_parameters or {}:
            if choose.random() < 0.5:
                case.path_parameters[name] = fuzzed.ids[name]
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL

    def reduced(case: Case[Any], choose: Random) -> None:
        # A request with dozens of fields is never good.
        if not isinstance(case.body, dict) or not required:
            return
        optional = sorted(case.body.keys() - required)
        for name in choose.sample(optional, max(0, len(optional) - choose.randrange(4))):
            del case.body[name]
        for name in required & good.keys():
            if choose.random() < 0.7:
                case.body[name] = good[name]

    def run(case: Case[Any], choose: Random) -> None:
        completed(case, choose)
        if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
            reduced(case, choose)
        fuzzed.send(case)

    limits = settings(
        max_examples=examples // 2,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    choices = st.randoms(use_true_random=False)
    # Where nothing is read nothing can be wrong.
    modes = MODES if operation.body or operation.query else MODES[:1]
    for mode in modes:
        limits(given(operation.as_strategy(generation_mode=mode), choices)(run))()
