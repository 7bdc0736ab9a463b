"""The gRPC face of the service."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from catenary.rpc import CallCount
from catenary.telemetry import get_logger
from catenary.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.execution import TaskRunner
from services.tokenizer.render_streams import RenderStreams, StreamLimits
from services.tokenizer.rendering import Parsers
from services.tokenizer.requests import RequestReader
from services.tokenizer.verdicts import ConstraintVerdicts
from services.tokenizer.workers import WorkerReady

CHUNK_BYTES = 1024 * 1024

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_log = get_logger(__name__)
_level = logging.getLogger(__name__)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Answers for one model.

    `calls` counts those of its server; `tokenizer_json` is the file that the workers were given, `ready` what
    they found, `parsers` those that its answers need.
    """

    def __init__(
        self,
        config: TokenizerConfig,
        runner: TaskRunner,
        calls: CallCount,
        *,
        tokenizer_json: bytes,
        ready: WorkerReady,
        parsers: Parsers,
    ) -> None:
        self._runner = runner
        self._reader = RequestReader(config)
        self._verdicts = ConstraintVerdicts(config, runner)
        self._file = tokenizer_json
        self.streams = RenderStreams(
            self._render, calls, StreamLimits(config.max_calls, config.max_message_mib)
        )
        """Those of RenderStream; to be told of a drain."""
        self.digest = tokenizer_pb2.TokenizerDigest(
            sha256=hashlib.sha256(tokenizer_json).hexdigest(),
            size=len(tokenizer_json),
            model=config.model_name,
            special_token_ids=ready.special_token_ids,
            has_chat_template=ready.has_chat_template,
            template_variables=ready.template_variables,
            tool_parser=parsers.tool,
            reasoning_parser=parsers.reasoning,
            response_template=parsers.response_template,
            renders_pairs=ready.renders_pairs,
            reads_tools=ready.reads_tools,
        )

    async def Render(
        self, request: tokenizer_pb2.RenderRequest, context: _Context
    ) -> tokenizer_pb2.RenderResponse:
        return await self._render(request)

    def RenderStream(
        self, request_iterator: AsyncIterator[tokenizer_pb2.RenderStreamRequest], context: _Context
    ) -> AsyncIterator[tokenizer_pb2.RenderStreamResponse]:
        return self.streams.serve(request_iterator)

    async def _render(self, request: tokenizer_pb2.RenderRequest) -> tokenizer_pb2.RenderResponse:
        kind = request.WhichOneof("input") or "render"
        answer = await self._runner.tokens(kind, self._reader.render(request))
        if _level.isEnabledFor(logging.DEBUG):
            tokens = [len(ids) for ids in answer.prompts]
            _log.debug("rendered", render_id=request.request_id[:128], tokens=tokens)
        tails = answer.tails or [""] * len(answer.prompts)
        starts = answer.second_starts or [0] * len(answer.prompts)
        return tokenizer_pb2.RenderResponse(
            prompts=[
                tokenizer_pb2.RenderedPrompt(token_ids=ids, text_tail=tail, second_start=start or None)
                for ids, tail, start in zip(answer.prompts, tails, starts, strict=True)
            ]
        )

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: _Context
    ) -> tokenizer_pb2.TokenizeResponse:
        answer = await self._runner.tokens("tokenize", self._reader.tokenize(request))
        return tokenizer_pb2.TokenizeResponse(token_ids=answer.prompts[0])

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: _Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        text = await self._runner.text("detokenize", self._reader.detokenize(request))
        return tokenizer_pb2.DetokenizeResponse(text=text)

    async def CheckConstraint(
        self, request: tokenizer_pb2.CheckConstraintRequest, context: _Context
    ) -> tokenizer_pb2.CheckConstraintResponse:
        self._reader.check_model(request.model)
        await self._verdicts.check(request)
        return tokenizer_pb2.CheckConstraintResponse()

    async def ListTokenizers(
        self, request: tokenizer_pb2.ListTokenizersRequest, context: _Context
    ) -> tokenizer_pb2.ListTokenizersResponse:
        return tokenizer_pb2.ListTokenizersResponse(tokenizers=[self.digest])

    async def GetTokenizer(
        self, request: tokenizer_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[tokenizer_pb2.GetTokenizerResponse]:
        self._reader.check_model(request.model)
        for start in range(0, len(self._file), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            yield tokenizer_pb2.GetTokenizerResponse(
                chunk=self._file[start:end], digest=self.digest if end >= len(self._file) else None
            )
