"""A constraint before it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from catenary.v1 import common_pb2, tokenizer_pb2
from catenary.v1.common_pb2 import ConstraintKind
from gateway.errors import bad_request
from gateway.schemas import RequestLimits
from gateway.text import TokenizerPool


@dataclass(frozen=True, slots=True)
class Wanted:
    """`kind` and `source` as in `catenary.v1.Constraint`; `param` is the field of the request for errors;
    `part`: what it has in it of another field, checked first."""

    kind: ConstraintKind.ValueType
    source: str
    param: str
    part: Wanted | None = None

    @classmethod
    def json(cls, kind: ConstraintKind.ValueType, value: Any, param: str) -> Wanted:
        """With a source that is JSON; a text is taken as it is."""
        return cls(kind, value if isinstance(value, str) else msgspec.json.encode(value).decode(), param)

    async def check(self, model: str, pool: TokenizerPool, limits: RequestLimits) -> None:
        """Have it compiled for `model`. Raises ApiError: 400 if it cannot be honoured."""
        if self.part is not None:
            await self.part.check(model, pool, limits)
        size = len(self.source.encode())
        if size > limits.max_constraint_bytes:
            raise bad_request(
                f"Invalid '{self.param}': it has {size} bytes; at most {limits.max_constraint_bytes} are "
                "allowed.",
                self.param,
            )
        await pool.check_constraint(
            tokenizer_pb2.CheckConstraintRequest(model=model, constraint=self.message(), param=self.param)
        )

    def message(self, after: str | None = None) -> common_pb2.Constraint:
        """For the engine. `after`: text behind which it holds; None: from the first token on."""
        return common_pb2.Constraint(kind=self.kind, source=self.source, after=after)
