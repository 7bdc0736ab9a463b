"""Options of the servicer: how it watches its core, keeps to its routers, and what a sequence may bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, Field


class ServicerOptions(BaseModel):
    """A part of the engine's options."""

    headings: ClassVar[Mapping[str, str]] = {
        "stall_limit_s": "Health, links to routers",
        "max_stop_token_ids": "What a request may hold",
        "publish_kv": "KV events",
    }

    stall_limit_s: float = Field(
        30.0, gt=0, le=86_400, description="An engine with work and no step for so long reports STALLED."
    )
    kept_limit_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Longest time for which a router keeps this engine from other routers, for a sequence "
        "that needs it empty, or most of it. Then its turn is over: it comes after others that want theirs. "
        "With less than the routers' longest lane_wait_s an honest one may lose its turn.",
    )
    core_restart_backoff_s: float = Field(
        1.0,
        gt=0,
        le=3_600,
        description="Wait before a dead core is started again; doubles with each failure.",
    )
    core_restart_backoff_max_s: float = Field(30.0, gt=0, le=3_600, description="Longest such wait.")
    core_stop_s: float = Field(
        10.0, gt=0, le=600, description="Time that a core has to end by itself before it is killed."
    )
    attach_timeout_s: float = Field(
        10.0, gt=0, le=600, description="Time that a router has to answer when the engine attaches."
    )
    attach_backoff_s: float = Field(
        0.2,
        gt=0,
        le=3_600,
        description="Wait before a lost router is dialled again; doubles with each failure.",
    )
    attach_backoff_max_s: float = Field(5.0, gt=0, le=3_600, description="Longest such wait.")
    attach_refused_backoff_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Wait after a router refused the engine (another schema revision, a wrong secret).",
    )
    orphan_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3_600,
        description="A router silent for so long loses its sequences here, even if its lease is longer.",
    )
    max_stop_token_ids: int = Field(
        64, ge=0, le=4_096, description="Stop token ids that a sequence may bring."
    )
    max_logit_bias: int = Field(
        1_024, ge=0, le=1_000_000, description="Tokens that a sequence may give a logit bias."
    )
    max_bad_words: int = Field(256, ge=0, le=100_000, description="Bad words that a sequence may bring.")
    max_bad_word_tokens: int = Field(32, ge=1, le=4_096, description="Longest bad word in tokens.")
    remembered_handles: int = Field(
        16_384, ge=1, le=10_000_000, description="Ended sequences that late aborts are still answered for."
    )
    publish_kv: bool = Field(
        True,
        description="Tell the routers which blocks the prefix cache holds, so that requests go where their "
        "prefix is.",
    )
    kv_publish_interval_s: float = Field(
        0.2, ge=0, le=60, description="Changes of the prefix cache are told together, so many seconds apart."
    )
    kv_publish_queue: int = Field(
        65_536,
        ge=1,
        le=10_000_000,
        description="Changes that may wait for a router that does not read them; with more it is told anew "
        "what there is.",
    )
    kv_resync_interval_s: float = Field(
        1.0,
        ge=0,
        le=3_600,
        description="Seconds between two answers to a router that asks for all names again.",
    )
