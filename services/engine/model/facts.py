"""What a model directory says about the model: context length, end tokens, sampling defaults, tokenizer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary.schema import MAX_EOS_TOKEN_IDS
from services.engine.model.checks import read_json
from services.engine.model.errors import ModelError
from services.engine.model.numbers import shown


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Read from config.json, generation_config.json and tokenizer.json.

    `max_position` is None if the config names no limit; sampling values are None without a default.
    `ignored_sampling` names the defaults of generation_config.json that are not honoured here.
    """

    max_position: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_sha256: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    ignored_sampling: tuple[str, ...]


_SAMPLING: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: math.isfinite(value) and value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= -1 and value.is_integer(),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0.01 <= value <= 100,
}
# Names of the longest sequence: most architectures', then GPT-2's and what followed it, then DBRX's.
_MAX_POSITION = ("max_position_embeddings", "n_positions", "max_seq_len")
# Values that change nothing: a default that is one of them is not missed.
_NEUTRAL_SAMPLING = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
}


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that a config names, None if it names none. Raises ModelError."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    longest = next((value for name in _MAX_POSITION if (value := _number(text.get(name)))), None)
    return int(longest) if longest else None


def read_facts(directory: Path, config: dict[str, Any]) -> DirectoryFacts:
    """Facts of a checked model directory. Raises ModelError for values of the wrong kind."""
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    vocab_size = _number(text.get("vocab_size"))
    if vocab_size is None or vocab_size < 1:
        raise ModelError(f"{directory / 'config.json'} names no vocab_size")
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = text.get("eos_token_id")
    defaults = {name: _default(generation, name, path=generation_path) for name in _SAMPLING}
    top_k = defaults["top_k"]
    return DirectoryFacts(
        max_position=longest_context(config),
        vocab_size=int(vocab_size),
        eos_token_ids=_token_ids(eos, int(vocab_size), directory),
        tokenizer_sha256=_sha256(directory / "tokenizer.json"),
        temperature=defaults["temperature"],
        top_p=defaults["top_p"],
        top_k=None if top_k is None else int(top_k),
        min_p=defaults["min_p"],
        repetition_penalty=defaults["repetition_penalty"],
        ignored_sampling=tuple(
            name for name, neutral in _NEUTRAL_SAMPLING.items() if generation.get(name) not in (None, neutral)
        ),
    )


def _default(generation: dict[str, Any], name: str, *, path: Path) -> float | None:
    """A sampling default, None if there is none. Raises ModelError for one that no request could ask for."""
    value = generation.get(name)
    if value is None:
        return None
    number = _number(value)
    if number is None or not _SAMPLING[name](number):
        raise ModelError(f"{path} has a {name} of {shown(value)}, which is no {name}")
    return number


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _token_ids(value: Any, vocab_size: int, directory: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_EOS_TOKEN_IDS:
        raise ModelError(
            f"model directory {directory} names {len(values)} eos_token_ids: {MAX_EOS_TOKEN_IDS} at most"
        )
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise ModelError(f"model directory {directory} names an eos_token_id outside its vocabulary")
    return tuple(sorted(set(values)))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
