"""The parts in which one route for vectors or scores differs from another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from gateway.pooling.work import Pooled, Work
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import PooledFields
from gateway.text.models import Model

T = TypeVar("T", bound=PooledFields)


class PooledTask(ABC, Generic[T]):
    """What a request asks to be computed: how it is read, and what its documents are."""

    id_prefix: ClassVar[str]
    """What ids of its answers begin with."""
    tasks: ClassVar[tuple[int, ...]]
    """Of the models that it works with."""

    @abstractmethod
    def parse(self, body: dict[str, Any], limits: RequestLimits) -> T:
        """The checked request. Raises ApiError."""

    @abstractmethod
    async def work(self, fields: T, model: Model) -> Work:
        """What is to be computed. Raises ApiError."""


class PooledEndpoint(PooledTask[T]):
    """A route: a task that is answered over HTTP."""

    @abstractmethod
    def write(self, fields: T, pooled: Pooled) -> bytes:
        """The answer's JSON. May take long: it runs beside the loop."""
