"""Stored responses as the API shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from catenary.telemetry import get_logger
from gateway.errors import ApiError, bad_request
from gateway.http.answers import Page, page_of
from gateway.responses import objects
from gateway.responses.objects import ResponseStatus, current_form, decode_response, encode_response
from gateway.responses.request import ResponseRequest
from gateway.responses.store import ConversationTooLarge, ResponseStore, StoredResponse

_log = get_logger(__name__)
_MIB = 1 << 20
# Decoding larger ones would block the loop.
_LARGE = 1 << 16
_PREVIOUS = "previous_response_id"


class Library:
    """Reads and writes stored responses. All methods raise ApiError: 404 for a response that is not stored or
    another owner's, 503 if the store does not answer."""

    def __init__(self, store: ResponseStore | None, max_conversation_bytes: int) -> None:
        """`store` None: nothing is stored. `max_conversation_bytes`: as large as a request's body may be, in
        which clients would send the conversation otherwise."""
        self._store = store
        self._max_bytes = max_conversation_bytes

    @property
    def exists(self) -> bool:
        """Whether anything can be stored."""
        return self._store is not None

    async def keep(self, request: ResponseRequest) -> None:
        """Store a final response if its request asks for it. The response says so if that fails."""
        response = request.response
        if self._store is None or not response.store:
            return
        try:
            await self._store.add(await request.written(lambda: record_of(request)))
        except ApiError:
            response.store = False
            _log.warning("response not stored", response=response.id)

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a stored response."""
        record = None if self._store is None else await self._store.get(owner, response_id)
        if record is None:
            raise not_found()
        if len(record.response) < _LARGE:
            return replace(record, response=current_form(record.response))
        return replace(record, response=await asyncio.to_thread(current_form, record.response))

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response."""
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


def record_of(request: ResponseRequest, runner: str | None = None) -> StoredResponse:
    """Return the record of a request and its response as it is now."""
    response = request.response
    return StoredResponse(
        response.id,
        request.owner,
        response.status,
        response.previous_response_id,
        encode_response(response),
        objects.encode_items(request.items),
        runner,
    )


def not_found() -> ApiError:
    """Return the error 404: no such response, or another owner's."""
    return ApiError(404, "No such response is stored.", code="response_not_found", param="response_id")


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
