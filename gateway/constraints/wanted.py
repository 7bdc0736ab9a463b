"""A constraint before it is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from catenary.schema_notes import without_notes
from catenary.v1 import common_pb2, tokenizer_pb2
from catenary.v1.common_pb2 import ConstraintKind
from gateway.errors import bad_request
from gateway.schemas.limits import RequestLimits
from gateway.text.pool import TokenizerPool


@dataclass(frozen=True, slots=True)
class Wanted:
    """`kind` and `source` as in `catenary.v1.Constraint`; `param` is the field of the request for errors;
    `part`: what it has in it of another field, checked first; `closed`: objects that list their properties,
    and say nothing of others, have no others."""

    kind: ConstraintKind.ValueType
    source: str
    param: str
    part: Wanted | None = None
    closed: bool = True

    @classmethod
    def schema(cls, value: Any, param: str) -> Wanted:
        """JSON of a schema, or of its text. Annotations are left out: other words ask for nothing else."""
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                # The tokenizer service, which compiles it, answers with the reason.
                return cls(common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, value, param)
        return cls.json(common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, without_notes(value), param)

    @classmethod
    def json(cls, kind: ConstraintKind.ValueType, value: Any, param: str) -> Wanted:
        """With a source that is JSON."""
        return cls(kind, msgspec.json.encode(value).decode(), param)

    def opened(self) -> Wanted:
        """The same with objects as the specification has them: with any other properties."""
        return replace(self, part=None if self.part is None else self.part.opened(), closed=False)

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
        return common_pb2.Constraint(
            kind=self.kind, source=self.source, after=after, closed_objects=self.closed
        )
