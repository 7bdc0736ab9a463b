"""The options of failover, of every service that keeps sequences going."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, Field

from catenary.resume.poison import PoisonedRequests
from catenary.resume.policy import ResumePolicy


class ResumeOptions(BaseModel):
    """A part of the gateway's options, and of the router's, which resumes plain `Generate` calls alone."""

    headings: ClassVar[Mapping[str, str]] = {
        "failover_wait_s": "Failover",
    }

    failover_wait_s: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="Seconds that a request (in a router: a plain Generate call) waits for an engine, a "
        "router or (in a gateway) a tokenizer in place of a lost one.",
    )
    failover_attempts: int = Field(
        8,
        ge=1,
        le=1000,
        description="Engines or routers in a row that a request may lose without a token before it fails.",
    )
    failover_lives: int = Field(
        64, ge=1, le=100_000, description="Engines or routers that a request may lose in all before it fails."
    )
    poison_ttl_s: float = Field(
        600,
        ge=0,
        le=86_400,
        description="Seconds for which a request that killed engines, the last one alone, is refused.",
    )
    max_poisoned: int = Field(
        1024, ge=1, le=1_000_000, description="Such requests that are remembered; older ones are forgotten."
    )

    def resume_policy(self) -> ResumePolicy:
        """How often and how long a sequence is tried again."""
        return ResumePolicy(self.failover_attempts, self.failover_lives, self.failover_wait_s)

    def poisoned_requests(self) -> PoisonedRequests:
        """A memory for requests that kill engines."""
        return PoisonedRequests(limit=self.max_poisoned, ttl_s=self.poison_ttl_s)
