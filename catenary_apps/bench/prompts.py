"""Conversations as the options say."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.config import ConfigError
from catenary_apps.bench.options import PromptsConfig
from catenary_apps.load import (
    Conversation,
    FileLimits,
    Lengths,
    PlainWords,
    Source,
    TokenizerText,
    TokenRange,
    lines_conversations,
    parse_lengths,
    random_conversations,
    sharegpt_conversations,
)

_DEFAULT_OUTPUT = "128"


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes conversations for any seed; options and files have been looked at."""

    config: PromptsConfig
    source: Source
    inputs: Lengths
    outputs: Lengths | None
    turns: int

    def make(self, count: int, seed: int) -> list[Conversation]:
        """Return up to `count` conversations: a file may have fewer. Raises StartRefused."""
        config = self.config
        fixed = self.outputs or parse_lengths(_DEFAULT_OUTPUT)
        if config.dataset == "random":
            return random_conversations(
                count,
                prompts=self.inputs,
                outputs=fixed,
                source=self.source,
                seed=seed,
                prefix_tokens=config.prefix_len,
                prefixes=config.num_prefixes,
                turns=self.turns,
            )
        if config.dataset_path is None:
            raise ConfigError(f"--dataset {config.dataset} needs --dataset-path")
        limits = FileLimits(
            max_bytes=config.dataset_max_mib << 20,
            max_prompt_tokens=config.max_prompt_len,
            max_total_tokens=config.max_total_len,
        )
        path = config.dataset_path
        try:
            if config.dataset == "lines":
                return lines_conversations(path, count, outputs=fixed, limits=limits, seed=seed)
            return sharegpt_conversations(
                path,
                count,
                counter=self.source.count,
                outputs=self.outputs,
                limits=limits,
                turns=self.turns,
                seed=seed,
            )
        except ValueError as error:
            raise ConfigError(f"--dataset-path: {error}") from None


def prompt_maker(config: PromptsConfig, *, text: bool, turns: int = 1) -> PromptMaker:
    """Look at the options. `text`: prompts must be texts, not token ids. Raises StartRefused, one line."""
    inputs = _lengths("--input-len", config.input_len)
    outputs = None if config.output_len is None else _lengths("--output-len", config.output_len)
    source = _source(config, text=text)
    if config.dataset == "sharegpt" and outputs is None and source.count("a") is None:
        raise ConfigError("--dataset sharegpt needs --tokenizer, or --output-len")
    if config.dataset == "random" and config.dataset_path is not None:
        raise ConfigError("--dataset-path needs --dataset sharegpt or lines")
    if config.dataset != "random" and config.prefix_len:
        raise ConfigError("--prefix-len is for --dataset random")
    if config.dataset == "lines" and turns > 1:
        raise ConfigError("--turns is for --dataset random and sharegpt")
    if config.num_prefixes > 1 and not config.prefix_len:
        raise ConfigError("--num-prefixes needs --prefix-len")
    return PromptMaker(config, source, inputs, outputs, turns)


def _lengths(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from None


def _source(config: PromptsConfig, *, text: bool) -> Source:
    if config.tokenizer is not None:
        try:
            return TokenizerText.load(config.tokenizer)
        except ValueError as error:
            raise ConfigError(f"--tokenizer: {error}") from None
    if text:
        return PlainWords()
    low, _, high = config.token_ids.partition(":")
    try:
        return TokenRange(int(low), int(high))
    except ValueError as error:
        raise ConfigError(f"--token-ids: {error}") from None
