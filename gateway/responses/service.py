"""Requests of the Responses API: create, follow, cancel and delete responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec
from starlette.types import Send

from catenary.telemetry import get_logger
from gateway.errors import ApiError, bad_request
from gateway.generation.plan import GenerationPlan
from gateway.generation.requests import ActiveRequest
from gateway.generation.service import GenerationService, Running
from gateway.http.answers import Call, Page, page_of, send_json
from gateway.responses import events, objects
from gateway.responses.background import BackgroundRuns
from gateway.responses.objects import (
    InputTokens,
    ResponseStatus,
    current_form,
    decode_response,
    encode_response,
)
from gateway.responses.producer import Producer
from gateway.responses.request import ResponseRequest, read_request, references, response_request
from gateway.responses.store import ConversationTooLarge, ResponseStore, StoredResponse, not_found
from gateway.schemas.ignored import unsupported_parameter
from gateway.streaming.answers import SSE_HEADERS

_log = get_logger(__name__)
_MIB = 1 << 20
# Decoding larger ones would block the loop.
_LARGE = 1 << 16
_PREVIOUS = "previous_response_id"


class Library:
    """Store of responses as the API reads and writes it. All methods raise ApiError: 404 for a response that
    is not stored or another owner's, 503 if the store does not answer."""

    def __init__(self, store: ResponseStore | None, max_conversation_bytes: int) -> None:
        """Make it. `store` None: nothing is stored. `max_conversation_bytes`: as large as a request's body
        may be, in which clients would send the conversation otherwise."""
        self._store = store
        self._max_bytes = max_conversation_bytes

    @property
    def exists(self) -> bool:
        return self._store is not None

    async def keep(self, request: ResponseRequest) -> None:
        """Store a final response if its request asks for it. The response says so if that fails."""
        response = request.response
        if self._store is None or not response.store:
            return
        try:
            await self._store.add(await request.written(request.record))
        except ApiError:
            response.store = False
            _log.warning("response not stored", response=response.id)

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        record = None if self._store is None else await self._store.get(owner, response_id)
        if record is None:
            raise not_found()
        if len(record.response) < _LARGE:
            return replace(record, response=current_form(record.response))
        return replace(record, response=await asyncio.to_thread(current_form, record.response))

    async def delete(self, owner: str, response_id: str) -> None:
        if self._store is None or not await self._store.delete(owner, response_id):
            raise not_found()

    async def cancel(self, owner: str, response_id: str) -> bytes:
        """End a background response unless it has ended; return its JSON."""
        record = await self.get(owner, response_id)
        response = decode_response(record.response)
        if not response.background:
            raise bad_request(
                "Only a response that is made in the background can be cancelled.", "response_id"
            )
        if self._store is None or record.status.final:
            return record.response
        response.status = ResponseStatus.CANCELLED
        data = encode_response(response)
        if await self._store.update(response_id, ResponseStatus.CANCELLED, data):
            return data
        return (await self.get(owner, response_id)).response

    async def referenced(self, owner: str, references: Mapping[int, str]) -> dict[str, objects.Item]:
        """Return stored items by their ids.

        Raise ApiError 400, which names the first place of the input whose item is not stored.

        Args:
            owner: of the items.
            references: the ids, by their places in an input."""
        wanted = list(dict.fromkeys(references.values()))
        found = {} if self._store is None else await self._store.items(owner, wanted)
        for place, item_id in references.items():
            if item_id not in found:
                param = f"input.{place}"
                raise bad_request(f"The item '{param}' refers to is not stored.", param, "item_not_found")
        if sum(map(len, found.values())) > self._max_bytes:
            raise bad_request(
                "Invalid 'input': the items that it refers to are larger than the limit of "
                f"{self._max_bytes / _MIB:.3g} MiB.",
                "input",
            )
        return {item_id: objects.decode_item(data) for item_id, data in found.items()}

    async def conversation(self, owner: str, response_id: str) -> list[objects.Item]:
        """Return all items up to the end of a response. Raise ApiError 400 if it cannot be continued."""
        if self._store is None:
            raise _no_previous()
        try:
            records = await self._store.conversation(owner, response_id, self._max_bytes)
        except ConversationTooLarge:
            raise bad_request(
                f"The conversation up to 'previous_response_id' is larger than the limit of "
                f"{self._max_bytes / _MIB:.3g} MiB.",
                _PREVIOUS,
            ) from None
        if records is None:
            raise _no_previous()
        if records[-1].status not in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE):
            raise bad_request("The response 'previous_response_id' is not complete.", _PREVIOUS)
        if sum(len(record.items) + len(record.response) for record in records) < _LARGE:
            return _items_of(records)
        return await asyncio.to_thread(_items_of, records)


def _items_of(records: Sequence[StoredResponse]) -> list[objects.Item]:
    found: list[objects.Item] = []
    for record in records:
        found += objects.decode_items(record.items)
        found += decode_response(record.response).output
    return found


def _no_previous() -> ApiError:
    return bad_request(
        "The response 'previous_response_id', or one before it, is not stored.",
        _PREVIOUS,
        "previous_response_not_found",
    )


def page(found: Sequence[objects.Item], *, order: str, limit: int, after: str | None) -> Page[objects.Item]:
    """Return a page of items. Raise ApiError 400 if `after` is none of them.

    Args:
        found: all items, oldest first.
        order: asc or desc.
        limit: most items to list.
        after: id of the item, in that order, after which the list begins.
    """
    ordered = list(found) if order == "asc" else list(reversed(found))
    if after is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise bad_request("Invalid 'after': no item of this response has that id.", "after")
        ordered = ordered[ids.index(after) + 1 :]
    return page_of(ordered, limit)


def stored_items(record: StoredResponse) -> list[objects.Item]:
    """Return the input of a stored response, oldest first."""
    return objects.decode_items(record.items)


class ResponsesService:
    def __init__(
        self,
        generation: GenerationService,
        library: Library,
        background: BackgroundRuns | None,
        *,
        max_references: int,
    ) -> None:
        """Set it up.

        Args:
            generation: runs the chats.
            library: the stored responses.
            background: runs responses without a waiting client; None if nothing is stored.
            max_references: to stored items in one input.
        """
        self._generation = generation
        self._requests = generation.requests
        self._library = library
        self._background = background
        self._max_references = max_references

    async def create(self, call: Call) -> None:
        """Answer a request. Raise ApiError before the answer has begun, ClientGone at any time."""
        streams = None
        with ExitStack() as streaming:
            async with self._requests.active(call) as active:
                request = await self._read(active)
                if request.response.background and request.stream and self._background is not None:
                    streams = self._background.streams
                    streaming.enter_context(streams.place())
                try:
                    await self._make(request, active)
                except ApiError as error:
                    raise request.renamed(error) from None
            # Outside of the request's place: readers must not take the places that making responses needs.
            if streams is not None:
                await streams.send(request.owner, request.response.id, -1, call.receive, call.send)

    async def _make(self, request: ResponseRequest, active: ActiveRequest) -> None:
        if request.response.background and self._background is not None:
            request.settle((await self._plan(request, active)).model)
            await self._background.start(request, active.caller)
            if not request.stream:
                await send_json(active.call.send, encode_response(request.response))
            return
        prepared = request.prepared(active.admit(request.chat), active.caller)
        plan = await self._generation.plan(prepared, active)
        async with self._generation.run(plan, active) as running:
            request.settle(plan.model)
            await running.begin()
            await self._answer(request, running, active.call.send)

    async def _plan(self, request: ResponseRequest, active: ActiveRequest) -> GenerationPlan:
        """Plan a request that is not run now."""
        model = self._requests.models.require(request.chat.model)
        return await self._generation.plan(request.prepared(model, active.caller), active)

    async def follow(self, owner: str, response_id: str, after: int, call: Call) -> None:
        """Answer with the events of a stored response that follow `after`. Raise as `create` does."""
        await self._library.get(owner, response_id)
        if self._background is None:
            raise not_found()
        with self._background.streams.place():
            await self._background.streams.send(owner, response_id, after, call.receive, call.send)

    async def count(self, call: Call) -> None:
        """Answer with the number of tokens of a request's input. Raise as `create` does."""
        async with self._requests.active(call) as active:
            request = await self._read(active)
            try:
                plan = await self._plan(request, active)
            except ApiError as error:
                raise request.renamed(error) from None
            await send_json(call.send, msgspec.json.encode(InputTokens(plan.prompt_tokens)))

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

    async def _read(self, active: ActiveRequest) -> ResponseRequest:
        request, passed_on = read_request(await active.body(), self._requests.limits)
        owner = active.caller.owner
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
            limits=self._requests.limits,
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
