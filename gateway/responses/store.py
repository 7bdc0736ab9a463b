"""What a store of responses offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gateway.responses.objects import Status


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its own input. `response` and `items` are JSON; `owner` names whose it is: nobody else
    is ever told of it. `runner`: the gateway that works on it in the background."""

    id: str
    owner: str
    status: Status
    previous: str | None
    response: bytes
    items: bytes
    runner: str | None = None


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
    async def add(self, record: StoredResponse, lease_s: float = 0.0) -> None:
        """Keep a response. One with a runner must be renewed by it within `lease_s`, until it is final."""

    @abstractmethod
    async def update(self, response_id: str, status: Status, response: bytes) -> bool:
        """Replace a response that is not final. False: it was final already, or is gone."""

    @abstractmethod
    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response, which counts as a use."""

    @abstractmethod
    async def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """A response and all that it goes on from, oldest first, which counts as a use of each.

        None if one of them is not there (any more). Raises ConversationTooLarge."""

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
