"""Requests of the Responses API: create, follow, cancel and delete responses."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.auth import Caller, caller_of
from gateway.errors import ApiError, bad_request
from gateway.generation.service import Endpoint, GenerationService, Running
from gateway.http.answers import send_json
from gateway.http.disconnect import ClientWatch
from gateway.responses import events
from gateway.responses.background import BackgroundRuns
from gateway.responses.library import Library, not_found
from gateway.responses.objects import InputTokens, encode_response
from gateway.responses.producer import Producer
from gateway.responses.request import ResponseRequest, read_request, references, response_request
from gateway.schemas.chat import ChatRequest
from gateway.schemas.ignored import unsupported_parameter
from gateway.streaming.writer import SSE_HEADERS


class ResponsesService:
    """Answers requests of the Responses API."""

    def __init__(
        self,
        generation: GenerationService,
        endpoint: Endpoint[ChatRequest],
        library: Library,
        background: BackgroundRuns | None,
        *,
        max_references: int,
    ) -> None:
        """Set it up.

        Args:
            generation: runs the chats.
            endpoint: how they are parsed and rendered.
            library: the stored responses.
            background: runs responses without a waiting client; None if nothing is stored.
            max_references: to stored items in one input.
        """
        self._generation = generation
        self._endpoint = endpoint
        self._library = library
        self._background = background
        self._max_references = max_references

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raise ApiError before the answer has begun, ClientGone at any time."""
        deadline = self._generation.deadline()
        streams = None
        with ExitStack() as streaming:
            with self._generation.place():
                request = await self._read(scope, receive)
                if request.response.background and request.stream and self._background is not None:
                    streams = self._background.streams
                    streaming.enter_context(streams.place())
                try:
                    async with ClientWatch(receive) as watch:
                        await self._make(request, caller_of(scope), deadline, watch, send)
                except ApiError as error:
                    raise request.renamed(error) from None
            # Outside of the request's place: readers must not take the places that making responses needs.
            if streams is not None:
                await streams.send(request.owner, request.response.id, -1, receive, send)

    async def _make(
        self, request: ResponseRequest, caller: Caller, deadline: float, watch: ClientWatch, send: Send
    ) -> None:
        if request.response.background and self._background is not None:
            plan, _ = await self._generation.prepare(self._endpoint, request.chat, caller, watch=watch)
            request.settle(plan.model)
            await self._background.start(request, caller)
            if not request.stream:
                await send_json(send, encode_response(request.response))
            return
        async with self._generation.run(
            self._endpoint, request.chat, caller, deadline=deadline, watch=watch
        ) as running:
            request.settle(running.generation.plan.model)
            await running.begin()
            await self._answer(request, running, send)

    async def follow(self, response_id: str, after: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the events of a stored response that follow `after`. Raise as `create` does."""
        owner = caller_of(scope).owner
        await self._library.get(owner, response_id)
        if self._background is None:
            raise not_found()
        with self._background.streams.place():
            await self._background.streams.send(owner, response_id, after, receive, send)

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the number of tokens of a request's input. Raise as `create` does."""
        with self._generation.place():
            request = await self._read(scope, receive)
            try:
                async with ClientWatch(receive) as watch:
                    plan, _ = await self._generation.prepare(
                        self._endpoint, request.chat, caller_of(scope), watch=watch
                    )
            except ApiError as error:
                raise request.renamed(error) from None
            await send_json(send, msgspec.json.encode(InputTokens(plan.prompt_tokens)))

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, and stop making it. Raise ApiError: 404, 503."""
        await self._library.delete(owner, response_id)
        self._stop(response_id)

    async def cancel(self, owner: str, response_id: str) -> bytes:
        """Stop making a background response; return its JSON. Raise ApiError: 400, 404, 503."""
        data = await self._library.cancel(owner, response_id)
        self._stop(response_id)
        return data

    def _stop(self, response_id: str) -> None:
        if self._background is not None:
            self._background.stop(response_id)

    async def _read(self, scope: Scope, receive: Receive) -> ResponseRequest:
        body = await self._generation.read(scope, receive)
        request, passed_on = read_request(body, self._generation.limits)
        owner = caller_of(scope).owner
        if not self._library.exists:
            for name in ("store", "background", "previous_response_id"):
                if getattr(request, name):
                    raise unsupported_parameter(name)
        history = []
        if request.previous_response_id is not None:
            history = await self._library.conversation(owner, request.previous_response_id)
        referred = references(request.input)
        if len(referred) > self._max_references:
            raise bad_request(
                f"Invalid 'input': at most {self._max_references} items of type item_reference are allowed.",
                "input",
            )
        stored = await self._library.referenced(owner, referred) if referred else {}
        return response_request(
            request,
            passed_on,
            history,
            stored,
            endpoint=self._endpoint,
            limits=self._generation.limits,
            owner=owner,
            store=request.store is not False and self._library.exists,
        )

    async def _answer(self, request: ResponseRequest, running: Running, send: Send) -> None:
        producer = Producer(request.response, running)
        if not request.stream:
            await producer.finish()
            await self._library.keep(request)
            await send_json(send, await request.written(lambda: encode_response(request.response)))
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        async for made in producer.stream(events.Created, events.InProgress):
            await send({"type": "http.response.body", "body": b"".join(made), "more_body": True})
        # Stored before the last event is sent: a client that has read it may continue the response.
        await self._library.keep(request)
        last = await request.written(producer.final_event)
        await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
