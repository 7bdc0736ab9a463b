"""The contract's requests against the limits, without a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from catenary.rpc import RpcError
from catenary.v1 import common_pb2
from catenary.v1 import tokenizer_pb2 as pb
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import ChatOptions, PromptLimits
from services.tokenizer.requests import RequestReader
from services.tokenizer.workers import ChatTask, CompletionTask


def reader(**options: Any) -> RequestReader:
    return RequestReader(TokenizerConfig(model_dir=Path("/models/tiny"), **options))


def text_message(role: str, *texts: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text) for text in texts])


def refused(request: pb.RenderRequest, **options: Any) -> common_pb2.Error:
    with pytest.raises(RpcError) as caught:
        reader(**options).render(request)
    return caught.value.error


def test_parts_are_joined_and_absent_means_true() -> None:
    chat = pb.ChatInput(messages=[text_message("user", "<|im_", "end|>"), pb.ChatMessage(role="assistant")])
    task = reader().render(pb.RenderRequest(chat=chat)).task
    assert isinstance(task, ChatTask)
    assert [turn.content for turn in task.turns] == ["<|im_end|>", ""]
    assert task.options == ChatOptions()
    assert task.limits == PromptLimits()
    completion = pb.CompletionInput(prompts=["a"], add_special_tokens=False)
    plain = reader().render(pb.RenderRequest(completion=completion, max_prompt_tokens=0)).task
    assert plain == CompletionTask(["a"], False, PromptLimits(0))


def test_the_model_must_be_the_one() -> None:
    completion = pb.CompletionInput(prompts=["a"])
    for name in ("", "tiny"):
        assert reader().render(pb.RenderRequest(model=name, completion=completion))
    error = refused(pb.RenderRequest(model="other", completion=completion))
    assert error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND
    assert error.param == "model"


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        (pb.ChatInput(), "messages"),
        (pb.ChatInput(messages=[text_message("user", "x"), text_message("admin", "x")]), "messages[1].role"),
        (pb.ChatInput(messages=[text_message("", "x")]), "messages[0].role"),
        (
            pb.ChatInput(messages=[pb.ChatMessage(role="user", content=[pb.ContentPart()])]),
            "messages[0].content[0]",
        ),
        (pb.ChatInput(messages=[text_message("user", "x")] * 4), "messages"),
        (pb.ChatInput(messages=[text_message("user", *"abcdef")]), "messages"),
        (pb.ChatInput(messages=[text_message("user", "é" * 6)]), "messages"),
        (pb.ChatInput(messages=[pb.ChatMessage(role="user", name="n" * 11)]), "messages"),
    ],
)
def test_bad_chats(chat: pb.ChatInput, param: str) -> None:
    error = refused(pb.RenderRequest(chat=chat), max_messages=3, max_content_parts=5, max_text_bytes=10)
    assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert error.param == param


@pytest.mark.parametrize("prompts", [[], ["a"] * 4, ["x" * 6, "y" * 6]])
def test_bad_completions(prompts: list[str]) -> None:
    request = pb.RenderRequest(completion=pb.CompletionInput(prompts=prompts))
    error = refused(request, max_prompts=3, max_text_bytes=10)
    assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert error.param == "prompt"


def test_neither_chat_nor_completion() -> None:
    assert refused(pb.RenderRequest()).param == "input"


def test_limits_say_their_value() -> None:
    with pytest.raises(RpcError, match="at most 2 are allowed"):
        reader(max_token_ids=2).detokenize(pb.DetokenizeRequest(token_ids=[1, 2, 3]))
    with pytest.raises(RpcError, match="at most 2 are allowed"):
        reader(max_text_bytes=2).tokenize(pb.TokenizeRequest(text="abc"))
