"""The gRPC methods of the service, and RenderStream: many renders at once on one stream, each of its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from catenary.outbox import Messages, Outbox
from catenary.rpc import CallCount, RpcError, recorded, refuse
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.execution import ConstraintVerdicts, TaskRunner
from services.tokenizer.rendering import Parsers
from services.tokenizer.requests import RequestReader
from services.tokenizer.workers import WorkerReady

METHOD = "/catenary.v1.TokenizerService/Render"
"""The method that each request on a stream counts as, in metrics and traces."""

_log = get_logger(__name__)
_INTERNAL = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL, message="The tokenizer failed because of an internal error."
)

_MIB = 1 << 20

Render = Callable[[tokenizer_pb2.RenderRequest], Awaitable[tokenizer_pb2.RenderResponse]]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Of one stream.

    max_unread: requests at work and answers that the client does not read; the stream is read no further
    until there are less. max_message_mib: the largest answer, in MiB.
    """

    max_unread: int
    max_message_mib: int


class RenderStreams:
    """All streams of the service.

    `render` answers one request, or raises RpcError. While it does, the request is one of `calls`, and it is
    refused if there are as many as there may be.
    """

    def __init__(self, render: Render, calls: CallCount, limits: StreamLimits) -> None:
        self.render = render
        self._calls = calls
        self._limits = limits
        self._live: set[_Stream] = set()
        self._draining = False

    async def serve(
        self, requests: AsyncIterator[tokenizer_pb2.RenderStreamRequest]
    ) -> AsyncIterator[tokenizer_pb2.RenderStreamResponse]:
        """Yield the answers of one stream, to its end. Raises RpcError for what breaks the contract."""
        if self._draining:
            # It was admitted before the drain, and begins only now.
            return
        stream = _Stream(self.render, self._calls, self._limits)
        self._live.add(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            async for answer in stream.answers():
                yield answer
        finally:
            reader.cancel()
            stream.cancel()
            self._live.discard(stream)

    def drain(self) -> None:
        """Read no more; each stream ends with its last answer."""
        self._draining = True
        for stream in self._live:
            stream.end()


class _Stream(Outbox[tokenizer_pb2.RenderStreamResponse]):
    """One stream: requests at work, and the outbox of their answers."""

    def __init__(self, render: Render, calls: CallCount, limits: StreamLimits) -> None:
        self._render = render
        self._calls = calls
        self._max_answer_bytes = limits.max_message_mib * _MIB
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers = Messages[tokenizer_pb2.RenderStreamResponse]()
        super().__init__(self._answers, limit=limits.max_unread)
        self._ended = False
        self._failure: Exception | None = None

    @property
    def unread(self) -> int:
        """Requests at work and answers that the client has not read."""
        return len(self._tasks) + len(self._answers)

    async def read(self, requests: AsyncIterator[tokenizer_pb2.RenderStreamRequest]) -> None:
        """Take requests until there are no more."""
        try:
            async for request in requests:
                if self._ended:
                    return
                self._take(request)
                # Begin the request first: asking for the next message takes longer.
                await asyncio.sleep(0)
                await self.room()
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            _log.debug("stream of renders broke")
        except Exception as failure:
            self._failure = failure
            self.close(flush=True)
        finally:
            self.end()

    async def answers(self) -> AsyncIterator[tokenizer_pb2.RenderStreamResponse]:
        """Yield the answers to write, until nothing more comes. Raises the error that ended the reading."""
        while (answer := await self.next()) is not None:
            yield answer
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Take no more requests; the stream ends with the last answer."""
        self._ended = True
        if not self._tasks:
            self.close(flush=True)

    def cancel(self) -> None:
        """Cancel the requests at work: the client is gone."""
        for task in self._tasks.values():
            task.cancel()

    def _take(self, request: tokenizer_pb2.RenderStreamRequest) -> None:
        match request.WhichOneof("payload"):
            case "render":
                if request.call in self._tasks:
                    raise _invalid("The call's number is in use on this stream.")
                task = self._tasks[request.call] = asyncio.create_task(self._answer(request))
                # Not in the task itself: one that is cancelled early never begins.
                task.add_done_callback(lambda _: self._over(request.call))
            case "cancel":
                if (given_up := self._tasks.get(request.call)) is not None:
                    given_up.cancel()
            case _:
                raise _invalid("A message must be a render or the cancel of one.")

    async def _answer(self, request: tokenizer_pb2.RenderStreamRequest) -> None:
        answer = tokenizer_pb2.RenderStreamResponse(call=request.call)
        parent = request.traceparent or None
        with recorded(METHOD, request.caller_request_id, parent, label=METHOD) as record:
            try:
                self._calls.check()
                with self._calls.one():
                    answer.rendered.CopyFrom(await self._render(request.render))
                most = min(self._max_answer_bytes, request.max_answer_bytes or self._max_answer_bytes)
                if answer.ByteSize() > most:
                    # gRPC would end the stream with it.
                    raise _invalid(
                        f"The rendered prompt is larger than a message may be: {most} bytes, max_message_mib."
                    )
                record.code = grpc.StatusCode.OK
            except RpcError as refusal:
                answer.error.CopyFrom(refusal.error)
                record.code = refusal.status
            except Exception:
                _log.exception("call failed", method=METHOD)
                answer.error.CopyFrom(_INTERNAL)
                record.code = grpc.StatusCode.INTERNAL
        self.put(self._answers, answer)

    def _over(self, call: int) -> None:
        del self._tasks[call]
        # A request that was cancelled early leaves no answer.
        self.drained()
        if self._ended and not self._tasks:
            self.close(flush=True)


def _invalid(message: str) -> RpcError:
    return refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message)


CHUNK_BYTES = 1024 * 1024

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

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
