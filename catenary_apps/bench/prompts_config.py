"""The options that both benchmarks have: what is asked, and where the numbers go."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from catenary.config import ServiceConfig


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
        0, ge=0, le=1 << 20, description="Tokens that stand before a random prompt, shared by many."
    )
    num_prefixes: int = Field(1, ge=1, le=100_000, description="How many such prefixes there are.")
    max_prompt_len: int = Field(
        1024, ge=1, le=1 << 20, description="sharegpt: conversations with longer prompts are left out."
    )
    max_total_len: int = Field(
        2048, ge=1, le=1 << 21, description="sharegpt: so are those that are longer with their answers."
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
    seed: int = Field(0, description="All that is random follows from it.")
    save: Path | None = Field(
        None,
        description="File for the numbers as JSON (docs/benchmarking.md). A directory: a file in it that is "
        "called by the time.",
    )
    metadata: tuple[str, ...] = Field(
        (), description="What else --save and --json are to say of this run, as KEY=VALUE."
    )
    format: Literal["table", "json"] = Field(
        "table", description="How to print the result; --json is short for --format json."
    )
    progress: bool = Field(True, description="Show a bar on a terminal.")
