"""Which request goes before which."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.schemas.generation import GenerationFields


@dataclass(frozen=True, slots=True)
class Priorities:
    """Numbers of the service tiers; lower ones are computed first, and a request without a tier has 0."""

    priority: int
    flex: int

    def of(self, fields: GenerationFields) -> int:
        """A request's own number, else its tier's."""
        if fields.priority is not None:
            return fields.priority
        return {"priority": self.priority, "flex": self.flex}.get(fields.service_tier or "", 0)
