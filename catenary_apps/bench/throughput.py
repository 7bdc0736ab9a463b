"""`catenary bench throughput`: a batch through `catenary.LLM`, and how long it took."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from catenary.config import ConfigError, load, parse_flags
from catenary.runtime import StartRefused
from catenary.telemetry import configure_logging
from catenary.version import __version__
from catenary_apps.bench.options import BenchThroughputConfig, named_values
from catenary_apps.bench.prompts import prompt_maker
from catenary_apps.bench.serve_table import number
from catenary_apps.cli.output import check_file, file_in, refused, write_file
from catenary_apps.load import Conversation

if TYPE_CHECKING:
    from catenary_apps.llm import LLM, RequestOutput, SamplingParams

_NAME = "catenary bench throughput"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A batch in numbers; rates are per second of `duration_s`, which the start of the engine is not part of.
    `cached_tokens` are those of the prompts that were not computed. Where Ctrl-C ended it, `interrupted`, the
    `unfinished` requests are in no other number."""

    model: str
    requests: int
    interrupted: bool
    unfinished: int
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float


def run_throughput(config: BenchThroughputConfig, engine_flags: Sequence[str]) -> int:
    """Run `catenary bench throughput`: 1 with one line on stderr if the engine fails, 2 for wrong options.

    Raises KeyboardInterrupt after a Ctrl-C, once what was measured has been shown and written.
    """
    try:
        return _throughput(config, engine_flags)
    except (StartRefused, ValueError) as error:
        return refused(_NAME, error)
    except RuntimeError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1


def _throughput(config: BenchThroughputConfig, engine_flags: Sequence[str]) -> int:
    options = _engine_options(engine_flags, config.model)
    started = datetime.now(UTC)
    save = None if config.save is None else file_in(config.save, "throughput", started)
    if save is not None:
        check_file(save, "--save")
    metadata = named_values("--metadata", config.metadata)
    configure_logging(level=config.log_level, fmt=config.log_format, service="bench")
    conversations = prompt_maker(config, text=False).make(config.num_prompts + config.warmup, config.seed)
    if len(conversations) <= config.warmup:
        raise ConfigError(f"--warmup {config.warmup} leaves none of {len(conversations)} prompts")
    # It brings torch: not before the options have been looked at.
    from catenary_apps.llm import LLM

    with LLM(config.model, progress=config.progress, **options) as llm:
        if config.warmup:
            _generate(llm, config, conversations[: config.warmup], [])
        result = _measure(llm, config, conversations[config.warmup :])
    _tell(config, _document(config, options, result, started) | {"metadata": metadata}, result, save)
    if result.interrupted:
        raise KeyboardInterrupt
    return 0


def _engine_options(flags: Sequence[str], model: str) -> dict[str, Any]:
    """Return the options after --, by the names of `catenary.LLM`. A wrong option ends the process. Raises
    ConfigError."""
    from services.engine.config import EngineConfig

    options: dict[str, Any] = {}
    options |= parse_flags(EngineConfig, flags, prog=f"{_NAME} --")
    for name in ("config", "model", "served_model_name"):
        if name in options:
            raise ConfigError(f"--{name.replace('_', '-')} after --: the model is named before it")
    load(EngineConfig, ["--model", model, *flags], prog=_NAME)
    return options


def _measure(llm: LLM, config: BenchThroughputConfig, conversations: Sequence[Conversation]) -> BatchResult:
    """Return the batch, or what Ctrl-C left of it. Raises KeyboardInterrupt if that is nothing."""
    outputs: list[RequestOutput] = []
    begin, unfinished = perf_counter(), None
    try:
        _generate(llm, config, conversations, outputs)
    except KeyboardInterrupt:
        if not outputs:
            raise
        unfinished = len(conversations) - len(outputs)
    return _result(config.model, list(outputs), unfinished, perf_counter() - begin)


def _generate(
    llm: LLM,
    config: BenchThroughputConfig,
    conversations: Sequence[Conversation],
    outputs: list[RequestOutput],
) -> None:
    """Add each output as it ends, so that a Ctrl-C leaves some."""
    turns = [conversation.turns[0] for conversation in conversations]
    prompts = [turn.prompt if isinstance(turn.prompt, str) else list(turn.prompt) for turn in turns]
    sampling = [_sampling(config, turn.output_tokens) for turn in turns]
    llm.generate(prompts, sampling, on_output=outputs.append)


def _sampling(config: BenchThroughputConfig, tokens: int | None) -> SamplingParams:
    from catenary_apps.llm import SamplingParams

    return SamplingParams(temperature=config.temperature, max_tokens=tokens, ignore_eos=True)


def _result(
    model: str, outputs: Sequence[RequestOutput], unfinished: int | None, seconds: float
) -> BatchResult:
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return BatchResult(
        model=model,
        requests=len(outputs),
        interrupted=unfinished is not None,
        unfinished=unfinished or 0,
        duration_s=seconds,
        input_tokens=prompts,
        cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        output_tokens=tokens,
        request_throughput=len(outputs) / seconds,
        output_throughput=tokens / seconds,
        total_throughput=(prompts + tokens) / seconds,
    )


def _document(
    config: BenchThroughputConfig, options: Mapping[str, Any], result: BatchResult, started: datetime
) -> dict[str, Any]:
    given = config.model_dump(mode="json", exclude={"metadata", "log_level", "log_format"})
    return {
        "schema": 1,
        "benchmark": "throughput",
        "catenary": __version__,
        "started": started.isoformat(timespec="seconds"),
        "options": given,
        "engine_options": dict(options),
        **asdict(result),
    }


def _tell(
    config: BenchThroughputConfig, document: Mapping[str, Any], result: BatchResult, save: Path | None
) -> None:
    encoded = msgspec.json.encode(document)
    if config.format == "json":
        print(encoded.decode())
    else:
        print(_sentences(result))
    if save is not None:
        write_file(save, msgspec.json.format(encoded), "--save")
        if save != config.save:
            print(f"{_NAME}: wrote {save}", file=sys.stderr)


def _sentences(result: BatchResult) -> str:
    ending = f"ended by Ctrl-C: {result.unfinished} prompts that were not done are in no number\n"
    return (ending if result.interrupted else "") + (
        f"{result.requests} prompts in {result.duration_s:.2f} s: {number(result.request_throughput)} "
        f"requests/s, {number(result.output_throughput)} output tokens/s, "
        f"{number(result.total_throughput)} tokens/s in all\n"
        f"{result.input_tokens:,} tokens in ({result.cached_tokens:,} cached), {result.output_tokens:,} out"
    )
