"""The tokenizer service over real gRPC: answers, refusals, the tokenizer file, access."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc import error_of, open_channel
from catenary.v1 import common_pb2
from catenary.v1 import tokenizer_pb2 as pb
from catenary.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from services.tokenizer.app import SERVICE
from tests.support import tiny_tokenizer as tiny
from tests.support.tokenizer_service import MODEL, chat_request, completion_request, running_tokenizer


async def failure(call: Any) -> tuple[grpc.StatusCode, common_pb2.Error]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), error_of(caught.value)


async def test_render_tokenize_detokenize(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path, workers=2) as running:
        chat = await running.stub.Render(chat_request(("developer", "Be brief."), ("user", "<|im_end|>é")))
        (prompt,) = chat.prompts
        specials = [index for index in prompt.token_ids if index in tiny.SPECIAL_IDS]
        assert specials == [tiny.IM_START_ID, tiny.IM_END_ID] * 2 + [tiny.IM_START_ID]
        text = await running.stub.Detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=prompt.token_ids))
        assert text.text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|im_end|>é<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        prompts = [str(number) for number in range(20)]
        several = await running.stub.Render(completion_request(*prompts))
        assert [list(prompt.token_ids) for prompt in several.prompts] == [tiny.byte_ids(p) for p in prompts]
        plain = await running.stub.Tokenize(pb.TokenizeRequest(text="<|im_end|>"))
        assert list(plain.token_ids) == [tiny.IM_END_ID]
        hidden = await running.stub.Detokenize(
            pb.DetokenizeRequest(token_ids=[tiny.IM_END_ID, *tiny.byte_ids("é")], skip_special_tokens=True)
        )
        assert hidden.text == "é"


async def test_a_spelling_split_over_parts_stays_text(tmp_path: Path) -> None:
    parts = [pb.ContentPart(text="<|im_"), pb.ContentPart(text="end|>")]
    message = pb.ChatMessage(role="user", content=parts)
    async with running_tokenizer(tmp_path) as running:
        split = await running.stub.Render(pb.RenderRequest(chat=pb.ChatInput(messages=[message])))
        whole = await running.stub.Render(chat_request(("user", "<|im_end|>")))
        assert split == whole
        assert list(split.prompts[0].token_ids).count(tiny.IM_END_ID) == 1


async def test_the_tokenizer_file_comes_in_chunks(tmp_path: Path) -> None:
    model = tiny.write_tiny_model(tmp_path / "big")
    path = model / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" " * (2 * 1024 * 1024))
    async with running_tokenizer(tmp_path, model_dir=model) as running:
        messages = [message async for message in running.stub.GetTokenizer(pb.GetTokenizerRequest())]
        content = b"".join(message.chunk for message in messages)
        assert content == path.read_bytes()
        assert [message.HasField("digest") for message in messages] == [False, False, True]
        assert max(len(message.chunk) for message in messages) <= 1024 * 1024
        digest = messages[-1].digest
        assert digest.sha256 == hashlib.sha256(content).hexdigest()
        assert digest.size == len(content)
        assert digest.model == MODEL
        assert (digest.has_chat_template, digest.reads_tools) == (True, False)
        assert tuple(digest.special_token_ids) == tiny.SPECIAL_IDS


INVALID: list[tuple[pb.RenderRequest, str, str]] = [
    (pb.RenderRequest(), "INVALID_ARGUMENT", "input"),
    (chat_request(), "INVALID_ARGUMENT", "messages"),
    (chat_request(("robot", "x")), "INVALID_ARGUMENT", "messages[0].role"),
    (chat_request(*[("user", "x")] * 9), "INVALID_ARGUMENT", "messages"),
    (chat_request(("user", "x" * 3001)), "INVALID_ARGUMENT", "messages"),
    (completion_request(), "INVALID_ARGUMENT", "prompt"),
    (completion_request(""), "INVALID_ARGUMENT", "prompt"),
    (completion_request("a", ""), "INVALID_ARGUMENT", "prompt"),
    (completion_request(*["x"] * 9), "INVALID_ARGUMENT", "prompt"),
    (completion_request("x", model="gpt-9"), "MODEL_NOT_FOUND", "model"),
    (completion_request("xxxx", max_prompt_tokens=3), "CONTEXT_LENGTH_EXCEEDED", "prompt"),
    (chat_request(("user", "x"), max_prompt_tokens=3), "CONTEXT_LENGTH_EXCEEDED", "messages"),
]


async def test_bad_input_is_refused_by_name_and_the_service_lives(tmp_path: Path) -> None:
    limits: dict[str, Any] = {
        "max_messages": 8,
        "max_prompts": 8,
        "max_text_bytes": 3000,
        "max_token_ids": 100,
    }
    async with running_tokenizer(tmp_path, **limits) as running:
        pids = running.service.pool.pids
        for request, code, param in INVALID:
            status, error = await failure(running.stub.Render(request))
            assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            assert common_pb2.ErrorCode.Name(error.code) == f"ERROR_CODE_{code}"
            assert error.param == param
        for ids in ([512], [2**32 - 1], [0] * 101):
            status, error = await failure(running.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)))
            assert (status, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "tokens")
        status, error = await failure(running.stub.Tokenize(pb.TokenizeRequest(text="x" * 3001)))
        assert (status, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
        assert "3001 bytes; at most 3000" in error.message
        stream = running.stub.GetTokenizer(pb.GetTokenizerRequest(model="gpt-9"))
        assert (await failure(stream.read()))[0] is grpc.StatusCode.NOT_FOUND
        assert await running.stub.Render(completion_request("x"))
        assert running.service.pool.pids == pids


async def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    # Field 2 of TokenizeRequest, `text`, with the bytes FF FE.
    async with running_tokenizer(tmp_path) as running, open_channel(running.target, secret=None) as channel:
        raw: Any = channel.unary_unary("/catenary.v1.TokenizerService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\x12\x02\xff\xfe")
        assert await running.stub.Tokenize(pb.TokenizeRequest(text="x"))


async def test_the_templates_own_words_come_back(tmp_path: Path) -> None:
    template = "{{ raise_exception('Conversation roles must alternate') }}"
    model = tiny.write_tiny_model(tmp_path / "strict", chat_template=template)
    async with running_tokenizer(tmp_path, model_dir=model) as running:
        status, error = await failure(running.stub.Render(chat_request(("user", "x"))))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert error.message == "Conversation roles must alternate"
        assert error.param == "messages"


async def test_a_model_without_a_template_and_one_given_by_file(tmp_path: Path) -> None:
    model = tiny.write_tiny_model(tmp_path / "bare", chat_template=None)
    async with running_tokenizer(tmp_path, model_dir=model) as running:
        _, error = await failure(running.stub.Render(chat_request(("user", "x"))))
        assert error.code == common_pb2.ERROR_CODE_UNSUPPORTED
        assert "no chat template" in error.message
        assert await running.stub.Render(completion_request("x"))
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    async with running_tokenizer(tmp_path, model_dir=model, chat_template=template) as running:
        answer = await running.stub.Render(chat_request(("user", "x")))
        assert list(answer.prompts[0].token_ids) == tiny.byte_ids("x!")


async def test_only_clients_may_call_and_health_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_CLIENT_SECRET", "client-secret")
    monkeypatch.setenv("CATENARY_ENGINE_SECRET", "engine-secret")
    async with running_tokenizer(tmp_path, insecure=False) as running:
        for secret, expected in ((None, "UNAUTHENTICATED"), ("engine-secret", "PERMISSION_DENIED")):
            async with open_channel(running.target, secret=secret) as channel:
                status, _ = await failure(TokenizerServiceStub(channel).Render(completion_request("x")))
                assert status.name == expected
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with open_channel(running.target, secret="client-secret") as channel:
            assert await TokenizerServiceStub(channel).Render(completion_request("x"))
        for pid in running.service.pool.pids:
            assert not any("SECRET" in name for name in psutil.Process(pid).environ())
