"""The options of `catenary bench serve`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from catenary.addresses import server_url
from catenary.config import settings
from catenary_apps.bench.prompts_config import PromptsConfig
from catenary_apps.bench.vllm_names import NAMES

Percent = Annotated[float, Field(ge=0, le=100)]


class BenchServeConfig(PromptsConfig):
    """Load on a server of the OpenAI API, and what it shows."""

    model_config = settings(prefix="CATENARY_BENCH_")

    base_url: str = Field("http://127.0.0.1:8000", min_length=1, description="Base URL of the server.")
    endpoint: Literal["completions", "chat"] = Field("completions", description="Which route is asked.")
    model: str | None = Field(None, description="Model to ask. Absent: the server's first.")
    api_key: str | None = Field(
        None, description="API key to send; other users of this machine can read a flag."
    )
    header: tuple[str, ...] = Field((), description="Headers to send with each request, as NAME=VALUE.")
    extra_body: str | None = Field(
        None,
        description="JSON object whose fields each body gets; they win over what is there, null takes out.",
    )
    request_id_prefix: str | None = Field(
        None,
        max_length=64,
        description="Send x-request-id: this, then CONVERSATION-TURN, from 0. Absent: none is sent.",
    )
    ready_timeout_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Seconds that the server may take to be there and to list the model. 0: not waited for.",
    )
    timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds that a request may take; then it has failed."
    )
    ca_file: Path | None = Field(None, description="Authorities for HTTPS instead of the system's.")
    insecure: bool = Field(False, description="Accept any HTTPS certificate.")
    request_rate: float | None = Field(
        None,
        ge=1e-6,
        le=1e6,
        description="Conversations that begin per second, however slow the answers are. inf, or absent: as "
        "soon as there is a place.",
    )
    burstiness: float = Field(
        1.0,
        ge=0.001,
        le=1e6,
        description="Shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts.",
    )
    ramp_up: Literal["linear", "exponential"] | None = Field(
        None, description="The rate goes from --ramp-up-from to --ramp-up-to over the run."
    )
    ramp_up_from: float | None = Field(None, ge=1e-6, le=1e6, description="First rate of the ramp.")
    ramp_up_to: float | None = Field(None, ge=1e-6, le=1e6, description="Last rate of the ramp.")
    max_concurrency: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Most conversations at a time. With a rate, waiting for a place counts as latency.",
    )
    duration_s: float | None = Field(
        None,
        gt=0,
        le=604_800,
        description="None begins after so many seconds, even if there are prompts left.",
    )
    warmup: int = Field(1, ge=0, le=100_000, description="Conversations before, which are not counted.")
    turns: int = Field(1, ge=1, le=1000, description="Questions of a conversation.")
    think_time_s: float = Field(
        0.0, ge=0, le=86_400, description="Seconds between an answer and the next question."
    )
    ignore_eos: bool = Field(False, description="Send ignore_eos: answers are as long as they may be.")
    strict_lengths: bool = Field(
        False,
        description="Send ignore_eos and min_tokens, and count an answer of another length as a failure.",
    )
    goodput: tuple[str, ...] = Field(
        (), description="Limits in milliseconds, as ttft:200,tpot:50 (e2e too): what keeps all is goodput."
    )
    percentiles: tuple[Percent, ...] = Field(
        (50.0, 90.0, 95.0, 99.0), min_length=1, max_length=32, description="Which percentiles are reported."
    )
    sweep: str | None = Field(
        None,
        description="rate=1,2,4 or concurrency=1,8,32: one run for each value, with --seed + 0, 1, 2.",
    )
    save_requests: bool = Field(False, description="Write the numbers of each request, too, to --save.")
    plots: Path | None = Field(
        None, description="Directory for plots as PNG (latencies, throughput over time, sweeps)."
    )

    @classmethod
    def elsewhere_for(cls, flag: str) -> str:
        """What an option of `vllm bench serve` is called here."""
        return f"in its place: {NAMES[flag]}" if flag in NAMES else ""

    @classmethod
    def elsewhere_flags(cls) -> Iterable[str]:
        """Options of `vllm bench serve`."""
        return NAMES

    @field_validator("base_url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        return server_url(value)

    @field_validator("request_rate", mode="before")
    @classmethod
    def _no_rate(cls, value: Any) -> Any:
        return None if value == "inf" else value
