"""The real embedding model beside a chat model: the vectors of transformers, by the openai client."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from services.engine.model import prepare_model
from tests.support.e2e_stack import ProcessStack
from tests.support.http import call

pytestmark = pytest.mark.model

MODEL = "all-MiniLM-L6-v2"
TOLERANCE = 1e-5
# See tests/unit/engine/core/test_pooled.py.
NEIGHBOURS = 2e-6
TEXTS = [
    "What is the capital of France?",
    "Paris is the capital and the largest city of France.",
    "Bananas are yellow.",
    "Größe, naïve café, 東京 and an emoji 🙂",
    "word " * 200,
    "x",
]


class Encoder:
    """The checkpoint in transformers, float32, pooled as its files say."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def vector(self, ids: list[int]) -> torch.Tensor:
        states = self._model(torch.tensor([ids])).last_hidden_state[0]
        return torch.nn.functional.normalize(states.mean(0), dim=0)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(prepare_model("minilm"))


@pytest.fixture
async def client(stack: ProcessStack) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float32),
        torch.as_tensor(expected, dtype=torch.float32),
        atol=tolerance,
        rtol=0,
    )


async def test_vectors_equal_transformers(client: Any, encoder: Encoder) -> None:
    # The client asks for base64 unless told otherwise, and decodes it.
    answer = await client.embeddings.create(model=MODEL, input=TEXTS)
    together = [item.embedding for item in answer.data]
    ids = [encoder.ids(text) for text in TEXTS]
    close(together, torch.stack([encoder.vector(one) for one in ids]))
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    by_ids = await client.embeddings.create(model=MODEL, input=ids)
    assert [item.embedding for item in by_ids.data] == together
    for index in (0, 4, 5):
        alone = await client.embeddings.create(model=MODEL, input=TEXTS[index])
        close(alone.data[0].embedding, together[index], NEIGHBOURS)
    numbers = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    encoded = await client.embeddings.with_raw_response.create(
        model=MODEL, input=TEXTS[0], encoding_format="base64"
    )
    raw = base64.b64decode(encoded.http_response.json()["data"][0]["embedding"])
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() == numbers.data[0].embedding
    assert math.isclose(sum(x * x for x in numbers.data[0].embedding), 1, abs_tol=1e-5)


async def test_truncation_keeps_what_frames_a_text(client: Any, encoder: Encoder) -> None:
    cut = await client.embeddings.create(
        model=MODEL, input=TEXTS[4], extra_body={"truncate_prompt_tokens": 20}
    )
    ids = encoder.ids(TEXTS[4])
    close(cut.data[0].embedding, encoder.vector([*ids[:19], ids[-1]]))
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        await client.embeddings.create(model=MODEL, input="word " * 300)
    whole = await client.embeddings.create(
        model=MODEL, input="word " * 300, extra_body={"truncate_prompt_tokens": -1}
    )
    assert whole.usage.prompt_tokens == 256


async def test_ranks_and_scores(stack: ProcessStack, encoder: Encoder) -> None:
    vectors = [encoder.vector(encoder.ids(text)) for text in TEXTS]
    expected = [float(vectors[0] @ vector) for vector in vectors[1:]]
    body = {"model": MODEL, "query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = (await call(stack.address, "POST", "/v1/rerank", body)).json()["results"]
    assert [result["index"] for result in ranked] == sorted(range(5), key=lambda index: -expected[index])
    assert ranked[0]["index"] == 0
    close([result["relevance_score"] for result in ranked], sorted(expected, reverse=True))
    body = {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    scores = (await call(stack.address, "POST", "/v1/score", body)).json()["data"]
    close([item["score"] for item in scores], expected)
    # Whatever else is in the batch.
    for index in (0, 3):
        one = {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS[1 + index]}
        found = (await call(stack.address, "POST", "/score", one)).json()["data"][0]["score"]
        close(found, scores[index]["score"], NEIGHBOURS)


async def test_both_models_are_served(client: Any) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == ["SmolLM2-135M-Instruct", MODEL]
    chat = await client.chat.completions.create(
        model=names[0], messages=[{"role": "user", "content": "Say hi."}], max_tokens=2
    )
    assert chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="generates text"):
        await client.embeddings.create(model=names[0], input="x")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="nope", input="x")
