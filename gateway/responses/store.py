"""What a store of responses offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.responses.objects import ResponseStatus


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its own input. `response` and `items` are JSON; `owner` names its owner; no
    other key is ever told of it. `runner`: the gateway that works on it in the background; `next_event`: the
    sequence number of its stream's next event, where they are kept; only `abandoned` tells it."""

    id: str
    owner: str
    status: ResponseStatus
    previous: str | None
    response: bytes
    items: bytes
    runner: str | None = None
    next_event: int | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of a stream in a row, as they are sent; `first` is the sequence number of the first."""

    first: int
    events: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """What follows in a response's stream, maybe not all of it.

    kept: the response was made with a stream that is kept; dropped: it was, until it became too large;
    final: the response is, so that nothing comes behind the last of the events."""

    events: Sequence[bytes]
    kept: bool
    dropped: bool
    final: bool


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Responses, bytes, and seconds since a response was used last. What exceeds them is forgotten, that
    which was used longest ago first."""

    max_count: int
    max_bytes: int
    max_age_s: float


class ConversationTooLarge(Exception):
    """A conversation has more bytes than the caller wants to have."""


class ResponseStore(ABC):
    """Responses by id. All methods raise ApiError 503 if the store does not answer."""

    @abstractmethod
    async def open(self) -> None:
        """Make ready for the other methods. Raises StartRefused if the store cannot be used."""

    @abstractmethod
    async def add(
        self, record: StoredResponse, lease_s: float = 0.0, events: Sequence[bytes] | None = None
    ) -> None:
        """Keep a response. One with a runner must be renewed by it within `lease_s`, until it is final.

        `events`: the first ones of its stream, which is kept then."""

    @abstractmethod
    async def update(
        self, response_id: str, status: ResponseStatus, response: bytes, last: EventBatch | None = None
    ) -> bool:
        """Replace a response that is not final, and add events to its stream, both or none. False: it was
        final already, or is gone."""

    @abstractmethod
    async def add_events(self, batches: Mapping[str, EventBatch], dropped: Collection[str]) -> None:
        """Add to the streams of responses that are not final, and forget those of the `dropped` ones."""

    @abstractmethod
    async def events(self, owner: str, response_id: str, after: int) -> StoredEvents | None:
        """Events behind the one with that sequence number; None: the response is not there."""

    @abstractmethod
    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response, which counts as a use."""

    @abstractmethod
    async def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """A response and all that it goes on from, oldest first, which counts as a use of each.

        None if one of them is not there (any more). Raises ConversationTooLarge."""

    @abstractmethod
    async def items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """The JSON of items of responses, as far as they are there, by their ids; a use of each response.

        They are those of all inputs, and of the outputs of final responses."""

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response. False: it was not there."""

    @abstractmethod
    async def renew(self, runner: str, lease_s: float) -> set[str]:
        """Say that `runner` lives for `lease_s` more. Returns the ids of its responses that are not final:
        what it runs besides was cancelled or deleted."""

    @abstractmethod
    async def abandoned(self) -> list[StoredResponse]:
        """Responses that are not final and whose runner was not renewed in time."""

    @abstractmethod
    async def sweep(self) -> None:
        """Forget what is too old."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of it."""
