"""The options of `catenary bench serve` and `catenary bench throughput`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from catenary.addresses import server_url
from catenary.config import ConfigError, ServiceConfig, settings


def named_values(option: str, entries: Sequence[str]) -> dict[str, str]:
    """Return values by name; of two with one name the last. Raises StartRefused, one line."""
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option}: NAME=VALUE")
        found[name.strip()] = value
    return found


_EXTRA = "--extra-body"

NAMES: Mapping[str, str] = {
    "--backend": "--endpoint completions or chat",
    "--host": "--base-url",
    "--port": "--base-url",
    "--served-model-name": "--model, by its name at the server",
    "--dataset-name": "--dataset",
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--random-range-ratio": "--input-len and --output-len ratio:N:R",
    "--random-prefix-len": "--prefix-len",
    "--prefix-repetition-prefix-len": "--prefix-len",
    "--prefix-repetition-suffix-len": "--input-len",
    "--prefix-repetition-num-prefixes": "--num-prefixes",
    "--prefix-repetition-output-len": "--output-len",
    "--sharegpt-output-len": "--output-len",
    "--custom-output-len": "--output-len",
    "--num-warmups": "--warmup",
    "--ready-check-timeout-sec": "--ready-timeout-s",
    "--ramp-up-strategy": "--ramp-up",
    "--ramp-up-start-rps": "--ramp-up-from",
    "--ramp-up-end-rps": "--ramp-up-to",
    "--top-p": _EXTRA,
    "--top-k": _EXTRA,
    "--min-p": _EXTRA,
    "--frequency-penalty": _EXTRA,
    "--presence-penalty": _EXTRA,
    "--repetition-penalty": _EXTRA,
    "--logprobs": _EXTRA,
    "--use-beam-search": _EXTRA,
    "--metric-percentiles": "--percentiles",
    "--percentile-metrics": "--percentiles, of all metrics",
    "--save-result": "--save",
    "--result-dir": "--save DIRECTORY",
    "--result-filename": "--save FILE",
    "--append-result": "--save DIRECTORY, one file a run",
    "--save-detailed": "--save-requests",
    "--label": "--metadata label=NAME",
    "--plot-timeline": "--plots",
    "--disable-tqdm": "--no-progress",
}


class PromptsConfig(ServiceConfig):
    """Prompts, their lengths, and outputs."""

    num_prompts: int = Field(
        100, ge=1, le=1_000_000, description="Prompts (conversations, with --turns), warm-up not among them."
    )
    dataset: Literal["random", "sharegpt", "lines"] = Field(
        "random",
        description="random: prompts of --input-len tokens. sharegpt: a file in ShareGPT's format. lines: a "
        'file with {"prompt": TEXT or IDS, "output_tokens": N} on each line.',
    )
    dataset_path: Path | None = Field(None, description="The file of sharegpt and lines.")
    dataset_max_mib: int = Field(1024, ge=1, le=1 << 20, description="Larger files are refused.")
    input_len: str = Field(
        "256",
        description="Tokens of a random prompt: N, uniform:LOW:HIGH, ratio:N:R (N * (1 - R) to N * (1 + R)), "
        "normal:MEAN:STD or lognormal:MEAN:STD.",
    )
    output_len: str | None = Field(
        None,
        description="Tokens of an answer, written alike. Absent: 128; with sharegpt, as long as the file's.",
    )
    prefix_len: int = Field(
        0, ge=0, le=1 << 20, description="Tokens of a shared prefix before each random prompt."
    )
    num_prefixes: int = Field(1, ge=1, le=100_000, description="Number of such prefixes.")
    max_prompt_len: int = Field(
        1024, ge=1, le=1 << 20, description="sharegpt: conversations with longer prompts are left out."
    )
    max_total_len: int = Field(
        2048,
        ge=1,
        le=1 << 21,
        description="sharegpt: conversations that are longer with their answers are left out.",
    )
    tokenizer: Path | None = Field(
        None,
        description="tokenizer.json of the model, its directory, or a hub's id that the local cache has: "
        "random prompts are texts of exactly so many tokens. Absent: completions get token ids, chats plain "
        "words.",
    )
    token_ids: str = Field(
        "1000:10000",
        description="LOW:HIGH: random ids are from LOW up to HIGH - 1.",
        pattern=r"^\d{1,9}:\d{1,9}$",
        examples=["1000:10000"],
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="Sampling temperature. Absent: the server's, or the model's."
    )
    seed: int = Field(0, description="Seed of all random choices.")
    save: Path | None = Field(
        None,
        description="File for the numbers as JSON (docs/benchmarking.md). A directory: a file named by "
        "the time.",
    )
    metadata: tuple[str, ...] = Field((), description="Further facts for --save and --json, as KEY=VALUE.")
    format: Literal["table", "json"] = Field(
        "table", description="How to print the result; --json is short for --format json."
    )
    progress: bool = Field(True, description="Show a bar on a terminal.")


Percent = Annotated[float, Field(ge=0, le=100)]


class BenchServeConfig(PromptsConfig):
    """Load on a server of the OpenAI API, and what it shows."""

    model_config = settings(prefix="CATENARY_BENCH_")

    base_url: str = Field("http://127.0.0.1:8000", min_length=1, description="Base URL of the server.")
    endpoint: Literal["completions", "chat"] = Field("completions", description="API route to call.")
    model: str | None = Field(None, description="Model to ask. Absent: the server's first.")
    api_key: str | None = Field(
        None, description="API key to send; other users of this machine can read a flag."
    )
    header: tuple[str, ...] = Field((), description="Headers to send with each request, as NAME=VALUE.")
    extra_body: str | None = Field(
        None,
        description="JSON object whose fields are added to each body; they replace fields of the same "
        "name, and null removes one.",
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
        description="Seconds to wait until the server lists the model. 0: do not wait.",
    )
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="Seconds after which a request has failed.")
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
        None, description="Shape of a rate that goes from --ramp-up-from to --ramp-up-to over the run."
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
        description="Seconds after which no further conversation begins, even if prompts are left.",
    )
    warmup: int = Field(1, ge=0, le=100_000, description="Conversations before, which are not counted.")
    turns: int = Field(1, ge=1, le=1000, description="Questions in each conversation.")
    think_time_s: float = Field(
        0.0, ge=0, le=86_400, description="Seconds between an answer and the next question."
    )
    ignore_eos: bool = Field(False, description="Send ignore_eos: answers are as long as they may be.")
    strict_lengths: bool = Field(
        False,
        description="Send ignore_eos and min_tokens, and count an answer of another length as a failure.",
    )
    goodput: tuple[str, ...] = Field(
        (),
        description="Limits in milliseconds, as ttft:200,tpot:50 (e2e too): requests within all of them "
        "count as goodput.",
    )
    percentiles: tuple[Percent, ...] = Field(
        (50.0, 90.0, 95.0, 99.0), min_length=1, max_length=32, description="Percentiles to report."
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
        """Return our name of an option of `vllm bench serve`."""
        return f"in its place: {NAMES[flag]}" if flag in NAMES else ""

    @classmethod
    def elsewhere_flags(cls) -> Iterable[str]:
        """Return options of `vllm bench serve`."""
        return NAMES

    @field_validator("base_url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        return server_url(value)

    @field_validator("request_rate", mode="before")
    @classmethod
    def _no_rate(cls, value: Any) -> Any:
        return None if value == "inf" else value


class BenchThroughputConfig(PromptsConfig):
    """A batch of prompts in this process. Options of the engine come last, after --."""

    model_config = settings(prefix="CATENARY_BENCH_")

    model: str = Field(
        "smollm2", min_length=1, description="Model: an alias, a directory, a GGUF file or a hub's id."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Lowest level that is logged."
    )
    warmup: int = Field(1, ge=0, le=100_000, description="Prompts before, which are not counted.")
