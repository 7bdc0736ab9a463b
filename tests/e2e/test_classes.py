"""Tiny random models with a head for classes, over HTTP: the probabilities of transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.e2e_stack import FurtherModel, StackPlan, running_stack
from tests.support.encoders import save_decoder_classifier
from tests.support.http import call
from tests.support.tiny_llm import classifier
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tiny_model

START_S = 120.0
TEXTS = ["A cat sleeps.", "QZX", "the rain in Spain", "x" * 40]


@pytest.mark.long
async def test_classes_over_http_are_those_of_transformers(tmp_path: Path) -> None:
    decoder, encoder = tmp_path / "decoder", tmp_path / "encoder"
    save_decoder_classifier("qwen2", decoder, vocab_size=VOCAB_SIZE)
    write_tiny_model(decoder, chat_template=None)
    classifier(encoder, 4, id2label={0: "bad", 1: "so so", 2: "good", 3: "none"})
    flags = {one: ("--model", str(one), "--dtype", "float32") for one in (decoder, encoder)}
    further = FurtherModel(encoder, "encoder", flags[encoder])
    plan = StackPlan(decoder, "decoder", engine_flags=flags[decoder], further=(further,))
    with running_stack(lambda _: plan) as stack:
        await stack.ready(timeout_s=START_S)
        for directory in (decoder, encoder):
            kind = transformers.AutoModelForSequenceClassification
            model = kind.from_pretrained(directory, dtype="float32").eval()
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
            answer = await call(stack.address, "POST", "/classify", {"model": directory.name, "input": TEXTS})
            assert answer.status == 200, answer.body
            for text, item in zip(TEXTS, answer.json()["data"], strict=True):
                with torch.inference_mode():
                    logits = model(torch.tensor([tokenizer.encode(text)])).logits[0]
                torch.testing.assert_close(torch.tensor(item["probs"]), logits.softmax(-1), atol=1e-5, rtol=0)
                assert item["label"] == model.config.id2label[int(logits.argmax())]
        stack.stop()
