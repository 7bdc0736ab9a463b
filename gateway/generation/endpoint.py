"""The parts in which one generating route differs from another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from gateway.constraints.structured import wanted_of
from gateway.constraints.wanted import Wanted
from gateway.parsing.choice import ParserChoice
from gateway.schemas.generation import GenerationFields
from gateway.schemas.limits import RequestLimits
from gateway.streaming.writer import AnyWriter
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool
from gateway.text.rendered import Rendered

T = TypeVar("T", bound=GenerationFields)


class Endpoint(ABC, Generic[T]):
    """A route: how its requests are read, rendered and answered."""

    id_prefix: ClassVar[str]
    """What ids of its answers begin with."""
    prompt_param: ClassVar[str]
    """The field that the prompt comes from."""
    default_max_tokens: ClassVar[int | None] = None
    """Tokens for a request without a limit; None: to the end of the context."""
    scores_stop_token: ClassVar[bool] = False
    """Whether a stop token that is not shown has a log probability in the answer."""
    writer: ClassVar[type[AnyWriter]]
    """What writes its answers."""

    @abstractmethod
    def parse(self, body: dict[str, Any], limits: RequestLimits) -> T:
        """The checked request. Raises ApiError."""

    def constraint(self, fields: T, model: Model) -> Wanted | None:
        """What the answer is constrained to; None: any text. Raises ApiError."""
        return wanted_of(fields)

    def parsing(self, fields: T, model: Model) -> ParserChoice:
        """What is read in the texts of the answer: nothing. Raises ApiError."""
        return ParserChoice()

    @abstractmethod
    async def render(self, fields: T, model: Model, pool: TokenizerPool, request_id: str) -> Rendered:
        """The request's prompts. Raises ApiError."""
