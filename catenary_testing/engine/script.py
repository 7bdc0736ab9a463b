"""The script of a scripted engine: its model, its capacity, its rules, its faults."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]
Microseconds = Annotated[float, Meta(ge=0, le=3_600_000_000)]


class Match(Enum):
    """How a rule's prompt is compared with a sequence's prompt."""

    EXACT = "exact"
    PREFIX = "prefix"
    ANY = "any"


class Then(Enum):
    """The ending after a rule's last token."""

    EOS = "eos"
    HASH = "hash"
    STALL = "stall"
    ERROR = "error"
    CRASH = "crash"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of a script's parts: a key that is not known is an error."""


class ScriptedModel(_Part, frozen=True):
    """The model that the engine claims to serve."""

    vocab_size: Count = 32_000
    eos_token_ids: tuple[Natural, ...] = (2,)
    max_model_len: Count = 4_096
    dtype: str = "float32"
    tokenizer_sha256: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # embed, score or classify: every sequence becomes a vector, a score, or probabilities of `labels`, that
    # are made from its ids.
    task: Literal["generate", "embed", "score", "classify"] = "generate"
    embedding_width: Natural = 0
    embedding_dimensions: tuple[Natural, ...] = ()
    any_dimensions: bool = False
    labels: tuple[str, ...] = ()
    # Ids that the hash never gives besides the end-of-sequence ones, for tests that decode to text.
    avoid: tuple[Natural, ...] = ()


class ScriptedCapacity(_Part, frozen=True):
    """Blocks and limits; sequences wait when blocks or places are short."""

    block_size: Count = 16
    total_blocks: Count = 1_024
    max_running: Count = 32
    max_waiting: Natural = 256
    max_batched_tokens: Count = 512
    # Keep full blocks for prompts that begin alike, as memory allows, and tell routers which.
    prefix_caching: bool = False


class ScriptedLatency(_Part, frozen=True):
    """How long a step takes, in addition to the script's delays: the sum of these. All zero: no time.

    Prompt tokens count that are computed and not cached; sequences and their KV blocks that are in the step.
    """

    step_base_ms: Milliseconds = 0
    prefill_us_per_token: Microseconds = 0
    us_per_sequence: Microseconds = 0
    us_per_block: Microseconds = 0

    def seconds(self, prefill_tokens: int, sequences: int, blocks: int) -> float:
        """Return the duration of a step that computes so much."""
        microseconds = (
            self.prefill_us_per_token * prefill_tokens
            + self.us_per_sequence * sequences
            + self.us_per_block * blocks
        )
        return self.step_base_ms / 1e3 + microseconds / 1e6


class Rule(_Part, frozen=True):
    """Tokens to replay for the sequences whose prompt matches."""

    prompt: tuple[Natural, ...] = ()
    match: Match = Match.EXACT
    tokens: tuple[Natural, ...] = ()
    # Log probability of tokens[i]; where absent the engine's own formula.
    logprobs: tuple[float, ...] = ()
    # Alternatives of tokens[i] as (id, log probability), best first.
    top_logprobs: tuple[tuple[tuple[Natural, float], ...], ...] = ()
    # Steps in which a sequence of this rule runs take at least so long.
    step_delay_ms: Milliseconds = 0
    then: Then = Then.EOS

    def matches(self, prompt: list[int]) -> bool:
        """Return whether the rule speaks for a sequence with this prompt."""
        if self.match is Match.ANY:
            return True
        wanted = list(self.prompt)
        return prompt == wanted if self.match is Match.EXACT else prompt[: len(wanted)] == wanted


class ScriptedFaults(_Part, frozen=True):
    """Faults from the start on. N tokens means: as soon as some sequence has generated so many."""

    stall_after_tokens: Count | None = None
    crash_after_tokens: Count | None = None
    # Ends the whole process, servicer and all, with status 70.
    exit_after_tokens: Count | None = None
    # Closes the Attach streams, once.
    drop_stream_after_tokens: Count | None = None
    # Refuses so many submits with OVERLOADED.
    refuse_first: Natural = 0
    # Fails so many starts of the core, after one that worked.
    fail_restarts: Natural = 0
    # Makes so many offers of other engines' KV worth nothing.
    fail_transfers: Natural = 0
    # Revision claimed in the hello instead of the true one.
    schema_revision: Natural | None = None


class Script(_Part, frozen=True):
    """A scripted engine. `Script()` is what `--scripted default` means."""

    model: ScriptedModel = ScriptedModel()
    capacity: ScriptedCapacity = ScriptedCapacity()
    latency: ScriptedLatency = ScriptedLatency()
    # Duration of each step.
    step_delay_ms: Milliseconds = 0
    # Duration of the start, in ten reports of progress.
    start_delay_ms: Milliseconds = 0
    rules: tuple[Rule, ...] = ()
    faults: ScriptedFaults = ScriptedFaults()

    def rule_for(self, prompt: list[int]) -> Rule | None:
        """Return the first rule that matches."""
        return next((rule for rule in self.rules if rule.matches(prompt)), None)


class ScriptError(ValueError):
    """A script cannot be read; the text is one line that names the place."""


def load_script(source: str) -> Script:
    """Return the script named by `--scripted`: the word `default`, or a YAML or JSON file.

    Raises ScriptError with one line that names the offending key.
    """
    if source == "default":
        return Script()
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ScriptError(f"cannot read the script {source}: {type(exc).__name__}") from exc
    try:
        script = msgspec.convert(yaml.safe_load(text) or {}, Script)
    except (yaml.YAMLError, msgspec.ValidationError) as exc:
        raise ScriptError(f"bad script {source}: {' '.join(str(exc).split())}") from exc
    _check(script, source)
    return script


def _check(script: Script, source: str) -> None:
    vocab = script.model.vocab_size
    ids = {"model.eos_token_ids": script.model.eos_token_ids, "model.avoid": script.model.avoid}
    for number, rule in enumerate(script.rules):
        ids[f"rules[{number}].tokens"] = rule.tokens
        if rule.logprobs and len(rule.logprobs) != len(rule.tokens):
            raise ScriptError(f"bad script {source}: rules[{number}].logprobs needs one value a token")
        if rule.top_logprobs and len(rule.top_logprobs) != len(rule.tokens):
            raise ScriptError(f"bad script {source}: rules[{number}].top_logprobs needs one list a token")
    for place, values in ids.items():
        if any(value >= vocab for value in values):
            raise ScriptError(f"bad script {source}: {place} has an id that is not below vocab_size {vocab}")
    if len({*script.model.eos_token_ids, *script.model.avoid}) >= vocab:
        raise ScriptError(f"bad script {source}: eos_token_ids and avoid leave no other id")
