"""A router that does what a test says: grants leases, submits, aborts, keeps silent, refuses."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import grpc

from catenary.rpc import Role, RpcError, RpcServer, refuse
from catenary.schema import SCHEMA_REVISION, revision_mismatch
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from tests.support.kv_follower import KvFollower
from tests.support.secrets import TestSecrets
from tests.support.waiting import eventually

_ACCESS = {"/catenary.v1.FleetService/": frozenset({Role.ENGINE})}


class FakeAttachment:
    """One engine's stream, with everything it said."""

    def __init__(self, epoch: int, hello: engine_pb2.EngineHello, context: Any) -> None:
        self.epoch = epoch
        self.hello = hello
        self._context = context
        # A stream takes one write at a time; the test and the handler both send.
        self._sending = asyncio.Lock()
        self.messages: list[engine_pb2.AttachRequest] = []
        self.steps: list[common_pb2.StepOutput] = []
        self.loads: list[engine_pb2.LoadReport] = []
        self.refusals: dict[int, common_pb2.Error] = {}
        self.aborts: list[tuple[int, int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, common_pb2.SequenceEnd] = {}
        # Per handle and token: its log probability and the alternatives.
        self.logprobs: dict[int, list[tuple[float, list[tuple[int, float]]]]] = {}
        self.closed = False

    async def send(self, **payload: Any) -> None:
        """Send one message."""
        async with self._sending:
            await self._context.write(engine_pb2.AttachResponse(**payload))

    async def submit(
        self, handle: int, spec: common_pb2.SequenceSpec, same_prompt_as: int | None = None
    ) -> None:
        """Submit a sequence."""
        submit = common_pb2.Submit(handle=handle, spec=spec, same_prompt_as=same_prompt_as)
        await self.send(submit=submit)

    async def abort(self, handle: int) -> None:
        """Abort a sequence."""
        await self.send(abort=engine_pb2.AbortSequence(handle=handle))

    async def end_of(self, handle: int) -> common_pb2.SequenceEnd:
        """Wait for the end of a sequence."""
        await eventually(lambda: handle in self.ends, f"the end of sequence {handle}")
        return self.ends[handle]

    async def refusal_of(self, handle: int) -> common_pb2.Error:
        """Wait for the refusal of a sequence."""
        await eventually(lambda: handle in self.refusals, f"the refusal of sequence {handle}")
        return self.refusals[handle]

    @property
    def load(self) -> engine_pb2.LoadReport:
        """The last report."""
        return self.loads[-1] if self.loads else engine_pb2.LoadReport()

    def note(self, message: engine_pb2.AttachRequest) -> None:
        """Sort a message in."""
        assert message.lease_epoch == self.epoch
        self.messages.append(message)
        match message.WhichOneof("payload"):
            case "step":
                self._note_step(message.step)
            case "load":
                self.loads.append(message.load)
            case "refusal":
                self.refusals[message.refusal.handle] = message.refusal.error
            case "abort_result":
                result = message.abort_result
                self.aborts.append((result.handle, result.outcome))
            case other:
                raise AssertionError(f"an engine sent {other}")

    def _note_step(self, step: common_pb2.StepOutput) -> None:
        self.steps.append(step)
        assert len(step.handles) == len(step.token_counts) == len(set(step.handles))
        assert sum(step.token_counts) == len(step.token_ids)
        offset = 0
        for handle, count in zip(step.handles, step.token_counts, strict=True):
            assert handle not in self.ends, "a row after the end"
            self.tokens.setdefault(handle, []).extend(step.token_ids[offset : offset + count])
            offset += count
        self._note_logprobs(step)
        for end in step.ends:
            self.ends[step.handles[end.row]] = end

    def _note_logprobs(self, step: common_pb2.StepOutput) -> None:
        columns, token, top = step.logprobs, 0, 0
        for row in columns.rows:
            for _ in range(step.token_counts[row]):
                width = columns.top_counts[token]
                ids, values = columns.top_ids[top : top + width], columns.top_logprobs[top : top + width]
                best = list(zip(ids, values, strict=True))
                self.logprobs.setdefault(step.handles[row], []).append((columns.sampled[token], best))
                token, top = token + 1, top + width
        assert (token, token, top) == (len(columns.sampled), len(columns.top_counts), len(columns.top_ids))


class FakePublication:
    """One engine's stream of KV events."""

    def __init__(self, hello: engine_pb2.KvHello, context: Any) -> None:
        self.hello = hello
        self.known = KvFollower()
        self.closed = False
        self._context = context

    async def resync(self) -> None:
        """Ask for a snapshot."""
        resync = engine_pb2.KvResync(last_number=self.known.number)
        await self._context.write(engine_pb2.PublishKvResponse(resync=resync))


class FakeRouter(engine_pb2_grpc.FleetServiceServicer):
    """Serves FleetService. Change the fields at any time."""

    def __init__(self, secrets: TestSecrets, listen: str) -> None:
        self._server = RpcServer(listen=[listen], secrets=secrets.pair(), insecure=False, access=_ACCESS)
        engine_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server.grpc)
        self._epochs = itertools.count(1)
        self.address = ""
        self.lease_ms = 10_000
        self.report_interval_ms = 50
        self.schema_revision = SCHEMA_REVISION
        self.renews = True
        # Cleared: nothing is read from any engine.
        self.reading = asyncio.Event()
        self.reading.set()
        self.attachments: list[FakeAttachment] = []
        self.publications: list[FakePublication] = []
        # What PublishKv is refused with.
        self.refuses_kv: common_pb2.Error | None = None
        self.attempts = 0

    @classmethod
    def at(cls, secrets: TestSecrets, directory: Path) -> FakeRouter:
        """A router on a unix socket in a directory."""
        return cls(secrets, f"unix:{directory}/router.sock")

    async def start(self) -> None:
        """Listen."""
        (self.address,) = await self._server.start()

    async def stop(self) -> None:
        """Cut everything."""
        await self._server.stop(0)

    async def attached(self, count: int = 1) -> FakeAttachment:
        """Wait until so many attachments were made; the last one."""
        await eventually(lambda: len(self.attachments) >= count, f"attachment {count}")
        return self.attachments[-1]

    # Both are coroutines that read and write by the context, as grpc.aio allows.
    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """One engine's stream."""
        self.attempts += 1
        first = await context.read()
        hello = first.hello
        mismatch = revision_mismatch(hello.schema_revision, hello.minimum_peer_revision, peer="engine")
        if mismatch:
            raise refuse(common_pb2.ERROR_CODE_SCHEMA_MISMATCH, mismatch)
        attachment = FakeAttachment(next(self._epochs), hello, context)
        await attachment.send(
            attached=engine_pb2.Attached(
                schema_revision=self.schema_revision,
                router_instance_id="fake-router",
                lease_epoch=attachment.epoch,
                lease_ms=self.lease_ms,
                report_interval_ms=self.report_interval_ms,
            )
        )
        self.attachments.append(attachment)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                attachment.note(message)
                await self.reading.wait()
                if message.WhichOneof("payload") == "load" and self.renews:
                    await attachment.send(renewed=engine_pb2.LeaseRenewed(sequence=message.load.sequence))
        finally:
            attachment.closed = True

    async def published(self, count: int = 1) -> FakePublication:
        """Wait for so many streams of KV events and the last one's snapshot; the last one."""
        await eventually(
            lambda: len(self.publications) >= count and self.publications[-1].known.complete,
            f"stream {count} of KV events",
        )
        return self.publications[-1]

    async def PublishKv(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """One engine's stream of KV events."""
        first = await context.read()
        publication = FakePublication(first.hello, context)
        self.publications.append(publication)
        if self.refuses_kv is not None:
            raise RpcError(self.refuses_kv)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                publication.known.take(message)
                await self.reading.wait()
        finally:
            publication.closed = True
