"""Options of the router."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from catenary.config import Expert, expected_one_of, settings
from catenary.resume import ResumeOptions
from catenary.rpc import RpcConfig
from services.router.admission import QueueOptions
from services.router.fleet import BreakerOptions
from services.router.placement import POLICIES, PlacementOptions

_POLICY = PlacementOptions()


def check_policy(name: str) -> str:
    """Return `name`. Raises ValueError if there is no such policy."""
    if name not in POLICIES:
        raise ValueError(f"there is no {name!r}: {expected_one_of(name, sorted(POLICIES))}")
    return name


# Above any number that means something: a larger one is a slip of the keyboard.
MAX_LANE = 1 << 32
# Of a model's places: lower classes are to get most of them.
MAX_RESERVED = 0.5
_ORDER = "in the order system, interactive, default, bulk."


class RouterConfig(ResumeOptions, RpcConfig):
    """Flags, CATENARY_ROUTER_ variables or YAML."""

    model_config = settings("CATENARY_ROUTER_")

    headings: ClassVar[Mapping[str, str]] = {
        "placement": "Placement",
        "placement_min_match": Expert("Placement: tuning of policies"),
        "max_live_sequences": "Admission",
        "max_engines": Expert("Engines and sessions: limits and intervals"),
        "handover_min_tokens": "Prefill and decode on different engines",
    }

    placement: str = Field(
        "cost", description="How an engine is chosen: " + ", ".join(sorted(POLICIES)) + "."
    )
    placement_for: tuple[str, ...] = Field(
        (), description="MODEL=POLICY pairs, for models whose engines are chosen otherwise."
    )
    kv_index_blocks: int = Field(
        10_000_000,
        ge=1,
        le=1_000_000_000,
        description="Cached blocks that the router knows of, each counted for every engine that has it; "
        "beyond that it forgets those it has known longest. One takes about 140 bytes.",
    )
    max_kv_resyncs: int = Field(
        16,
        ge=0,
        le=1_000_000,
        description="Gaps in the KV events of one stream, after each of which the engine is asked for all "
        "its blocks; with one more the stream ends.",
    )
    kv_memory_blocks: int = Field(
        1_000_000,
        ge=1,
        le=1_000_000_000,
        description="Blocks remembered as sent to engines that do not tell what they have cached.",
    )
    receipts: int = Field(
        1024, ge=1, le=100_000, description="Latest decisions of placement that Explain can tell of."
    )
    placement_min_match: float = Field(
        _POLICY.min_match,
        ge=0,
        le=1,
        description="Share of a prompt that an engine must have cached for its cache to count.",
    )
    placement_skew_sequences: int = Field(
        _POLICY.skew_sequences,
        ge=0,
        le=1_000_000,
        description="Sequences above the mean from which an engine is overloaded, and not chosen for its "
        "cache or a session; placement-skew-ratio must be exceeded, too.",
    )
    placement_skew_ratio: float = Field(
        _POLICY.skew_ratio,
        ge=1,
        le=1000,
        description="Multiple of the mean from which an engine is overloaded; placement-skew-sequences must "
        "be exceeded, too.",
    )
    placement_load_factor: float = Field(
        _POLICY.load_factor,
        gt=1,
        le=1000,
        description="Consistent hash: an engine is full at so many times the mean number of sequences.",
    )
    placement_decode_weight: float = Field(
        _POLICY.decode_weight,
        ge=0,
        le=1000,
        description="Cost of a token of KV that an engine holds, in tokens of prefill.",
    )
    placement_pressure_weight: float = Field(
        _POLICY.pressure_weight,
        ge=0,
        le=1e9,
        description="Cost of an engine whose KV or slots are half full, in tokens of prefill.",
    )
    session_ttl_s: float = Field(
        _POLICY.session_ttl_s,
        gt=0,
        le=31_536_000,
        description="Seconds without a sequence after which the engine of a session is forgotten.",
    )
    max_affine_sessions: int = Field(
        _POLICY.max_sessions, ge=1, le=10_000_000, description="Sessions whose engines are remembered."
    )
    max_live_sequences: int = Field(
        4096, ge=1, le=1_000_000, description="Sequences that may be live at once; more are refused."
    )
    max_live_tokens: int = Field(
        8_388_608, ge=1, le=1 << 32, description="Prompt tokens of live sequences; more are refused."
    )
    lane_sequences: tuple[int, int, int, int] = Field(
        (64, 1024, 1024, 4096),
        description="Sequences of a model that may wait for an engine: one number for each class, " + _ORDER,
    )
    lane_tokens: tuple[int, int, int, int] = Field(
        (1 << 20, 1 << 22, 1 << 22, 1 << 23),
        description="Tokens of a model's sequences that may wait, one number for each class.",
    )
    lane_wait_s: tuple[float, float, float, float] = Field(
        (10.0, 30.0, 60.0, 600.0),
        description="Seconds after which a sequence that waits is refused, one number for each class.",
    )
    lane_reserved: tuple[float, float, float] = Field(
        (0.02, 0.03, 0.05),
        description="Share of a model's places that system, interactive and default keep from lower classes.",
    )
    promote_after_s: float = Field(
        10.0, gt=0, le=86_400, description="Seconds after which a sequence that waits moves up one class."
    )
    tenant_share: float = Field(
        0.5, gt=0, le=1, description="Share of a class's queue that one tenant may take, if it has a name."
    )
    fair_quantum: int = Field(
        2048, ge=1, le=1 << 24, description="Uncached prompt tokens of a tenant's turn in a queue."
    )
    unserved_wait_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds after its last engine stopped serving during which requests for a model still "
        "wait for another one; then they are refused at once.",
    )
    engine_backlog: int = Field(
        8,
        ge=0,
        le=1 << 20,
        description="Sequences that an engine is given beyond those it runs at once, if it lets so many "
        "wait; the others wait in the router.",
    )
    max_request_tokens: int = Field(
        262_144, ge=1, le=1 << 24, description="Token ids of one request; larger ones are refused."
    )
    max_engines: int = Field(1024, ge=1, le=65536, description="Engines that may be attached.")
    max_sessions: int = Field(256, ge=1, le=65536, description="Gateways that may be connected.")
    max_session_unread: int = Field(
        8192,
        ge=1,
        le=1_000_000,
        description="Unread rows and answers of a gateway at which no more of its requests are taken.",
    )
    retry_after_ms: int = Field(
        1000,
        ge=1,
        le=3_600_000,
        description="Milliseconds after which a refused request may be tried again, at the least: what is "
        "told is the time in which the queue empties.",
    )
    max_retry_after_ms: int = Field(
        60_000, ge=1, le=3_600_000, description="The most that is told as that time."
    )
    lease_ms: int = Field(
        6000, ge=100, le=600_000, description="Milliseconds of silence after which an engine is lost."
    )
    report_interval_ms: int = Field(
        500, ge=10, le=60_000, description="Milliseconds between an engine's load reports."
    )
    heartbeat_s: float = Field(
        2,
        ge=0.05,
        le=600,
        description="Seconds within which a gateway hears from the router.",
    )
    hello_timeout_s: float = Field(
        10, gt=0, le=600, description="Seconds in which a stream must identify its engine."
    )
    slow_reader_s: float = Field(
        30, gt=0, le=3600, description="Seconds that a client or gateway may leave its stream unread."
    )
    abort_timeout_s: float = Field(
        30, gt=0, le=3600, description="Seconds after which an abort that no engine confirms is over."
    )
    stall_s: float = Field(
        60,
        gt=0,
        le=86_400,
        description="Seconds without a step after which an engine loses its sequences; keep it above the "
        "engines' own stall-limit-s.",
    )
    breaker_faults: int = Field(
        3,
        ge=1,
        le=1000,
        description="Faults of an engine or its link after which it is given nothing for a time; each "
        "sequence that ends well takes one off.",
    )
    breaker_window_s: float = Field(
        300, gt=0, le=86_400, description="Seconds after which such a fault is forgotten."
    )
    breaker_open_s: float = Field(
        5,
        gt=0,
        le=3600,
        description="Seconds of that time; it doubles with each single sequence that fails after it.",
    )
    breaker_open_max_s: float = Field(60, gt=0, le=86_400, description="Longest such time in seconds.")

    handover_min_tokens: int = Field(
        256,
        ge=1,
        le=1 << 24,
        description="Prompts with more tokens that no engine has cached are computed by an engine of role "
        "prefill, whose KV one of role decode then fetches, where there are both.",
    )

    @field_validator("placement")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        return check_policy(value)

    @field_validator("placement_for")
    @classmethod
    def _known_policies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        models = []
        for pair in value:
            model, equals, policy = pair.rpartition("=")
            if not equals or not model:
                raise ValueError(f"{pair!r} is not MODEL=POLICY")
            check_policy(policy)
            models.append(model)
        if len(set(models)) < len(models):
            raise ValueError("names a model twice")
        return value

    def placement_options(self) -> PlacementOptions:
        """Return the tuning of the policies. Four missed reports make an engine's load unknown."""
        return PlacementOptions(
            min_match=self.placement_min_match,
            skew_sequences=self.placement_skew_sequences,
            skew_ratio=self.placement_skew_ratio,
            load_factor=self.placement_load_factor,
            decode_weight=self.placement_decode_weight,
            pressure_weight=self.placement_pressure_weight,
            stale_s=4 * self.report_interval_ms / 1000,
            session_ttl_s=self.session_ttl_s,
            max_sessions=self.max_affine_sessions,
        )

    def placements(self) -> dict[str, str]:
        """Return the policies that `placement_for` names, by model."""
        return {model: policy for model, _, policy in (pair.rpartition("=") for pair in self.placement_for)}

    @field_validator("lane_sequences", "lane_tokens", "lane_wait_s")
    @classmethod
    def _not_negative(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if min(value) < 0 or not all(map(math.isfinite, value)) or max(value) > MAX_LANE:
            raise ValueError(f"each number must be between 0 and {MAX_LANE}")
        return value

    @field_validator("lane_reserved")
    @classmethod
    def _shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not (min(value) >= 0 and sum(value) <= MAX_RESERVED):
            raise ValueError(f"shares must not be negative, nor more than {MAX_RESERVED} together")
        return value

    def queues(self) -> QueueOptions:
        return QueueOptions(
            sequences=self.lane_sequences,
            tokens=self.lane_tokens,
            wait_s=self.lane_wait_s,
            reserved_shares=self.lane_reserved,
            tenant_share=self.tenant_share,
            promote_after_s=self.promote_after_s,
            quantum=self.fair_quantum,
            unserved_s=self.unserved_wait_s,
            retry_after_ms=self.retry_after_ms,
            max_retry_after_ms=max(self.retry_after_ms, self.max_retry_after_ms),
        )

    @model_validator(mode="after")
    def _lease_covers_reports(self) -> Self:
        if self.lease_ms < 2 * self.report_interval_ms:
            raise ValueError("lease_ms must be at least twice report_interval_ms")
        return self

    def breaker(self) -> BreakerOptions:
        return BreakerOptions(
            faults=self.breaker_faults,
            window_s=self.breaker_window_s,
            open_s=self.breaker_open_s,
            open_max_s=max(self.breaker_open_s, self.breaker_open_max_s),
        )
