"""Facts of a model directory: task, context length, end tokens, defaults, identity."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from catenary.parameters import SAMPLING
from catenary.schema import MAX_EOS_TOKEN_IDS, MAX_LABEL_LENGTH, MAX_LABELS
from services.engine.model.checks import ModelError, read_json, shown, weight_files


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Read from config.json, generation_config.json and tokenizer.json.

    `max_position` is None if the config names no limit. `sampling_defaults`: numbers of the sampler, by name.
    `ignored_sampling` names the defaults of generation_config.json that are not honoured here.
    """

    max_position: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_sha256: str
    sampling_defaults: Mapping[str, int | float]
    ignored_sampling: tuple[str, ...]


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
    """Return the facts of a checked model directory. Raises ModelError for values of the wrong kind."""
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
    named = [name for name, one in SAMPLING.items() if one.model_default and generation.get(name) is not None]
    return DirectoryFacts(
        max_position=longest_context(config),
        vocab_size=int(vocab_size),
        eos_token_ids=_token_ids(eos, int(vocab_size), directory),
        tokenizer_sha256=_sha256(directory / "tokenizer.json"),
        sampling_defaults={name: _default(generation[name], name, path=generation_path) for name in named},
        ignored_sampling=tuple(
            name for name, neutral in _NEUTRAL_SAMPLING.items() if generation.get(name) not in (None, neutral)
        ),
    )


def _default(value: Any, name: str, *, path: Path) -> int | float:
    """Return a sampling default. Raises ModelError for one that no request could ask for."""
    number, allowed = _number(value), SAMPLING[name].numbers
    if number is not None and allowed.whole and number.is_integer():
        number = int(number)
    if number is None or number not in allowed:
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


# By model type: the class of the body, that of the body with a head for classes, and whether positions begin
# after the padding's id, as RoBERTa's do.
ENCODERS = {
    "bert": ("BertModel", "BertForSequenceClassification", False),
    "roberta": ("RobertaModel", "RobertaForSequenceClassification", True),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaForSequenceClassification", True),
}

CLASS_HEAD = "ForSequenceClassification"
"""How transformers calls a class with a head for classes of texts."""


class Task(StrEnum):
    """Names are those of the contract's ModelTask."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"


def find_task(directory: Path, config: Mapping[str, Any], wanted: str = "auto") -> Task:
    """The task of a checked directory with this config: the one that is wanted, if the checkpoint allows it.

    auto: a model with a head for one class scores, one with several classifies, other encoders and
    directories of sentence-transformers embed, everything else generates. Raises ModelError with one readable
    line.
    """
    encoder = config["model_type"] in ENCODERS
    classifies = has_class_head(config)
    if wanted == "auto":
        if classifies:
            return Task.SCORE if len(class_labels(config)) == 1 else Task.CLASSIFY
        return Task.EMBED if encoder or (directory / "modules.json").is_file() else Task.GENERATE
    task = Task(wanted)
    if task is Task.GENERATE and encoder:
        raise ModelError(f"model {directory} is an encoder: it does not generate")
    if task in (Task.GENERATE, Task.EMBED) and classifies and not encoder:
        own = "score" if len(class_labels(config)) == 1 else "classify"
        raise ModelError(f"model {directory} is a decoder with a head for classes; its task is {own}")
    if task is Task.SCORE and encoder and not classifies:
        raise ModelError(f"model {directory} has no head for scores; its task is embed")
    if task is Task.SCORE and classifies and (count := len(class_labels(config))) != 1:
        raise ModelError(
            f"model {directory} tells {count} classes apart, its task is classify; a score needs one class"
        )
    if task is Task.CLASSIFY and not classifies:
        raise ModelError(f"model {directory} has no head for classes")
    return task


def has_class_head(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has a head for classes of texts."""
    names = config.get("architectures")
    return isinstance(names, list) and str(names[:1]).endswith(f"{CLASS_HEAD}']")


def class_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes of a model with a head for them, in the order of its logits.

    The config has a map of ids to names, or their number; it leaves both out for two classes.
    """
    named = config.get("id2label")
    count = len(named) if isinstance(named, dict) and named else config.get("num_labels", 2)
    if not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
        raise ModelError(f"config.json names {count!r} classes; 1 to {MAX_LABELS} can be told apart")
    names = {str(place): str(name) for place, name in named.items()} if isinstance(named, dict) else {}
    labels = [names.get(str(place), f"LABEL_{place}")[:MAX_LABEL_LENGTH] for place in range(count)]
    # A file of JSON can hold halves of surrogate pairs, which the wire cannot.
    return tuple(label.encode("utf-8", "replace").decode() for label in labels)


# Of each tensor: so many windows of so many bytes, spread from its first byte to its last.
_WINDOWS: Final = 4
_WINDOW_BYTES: Final = 4096


def weights_fingerprint(directory: Path) -> bytes:
    """A digest, 16 bytes, of each tensor's name, dtype, shape and a sample of its bytes.

    How the tensors are spread over files does not count. Training changes numbers all over, so a sample of
    each tensor finds it; one number that somebody changed by hand in a large tensor may stay unseen. The
    files are those that were checked and loaded. Raises OSError.
    """
    digests = sorted(digest for path in weight_files(directory) for digest in _tensors(path))
    return hashlib.blake2b(b"".join(digests), digest_size=16, person=b"catenary weight").digest()


def _tensors(path: Path) -> list[bytes]:
    """A digest of each tensor of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return [_tensor(file.fileno(), 8 + size, name, entry) for name, entry in header.items()]


def _tensor(file: int, base: int, name: str, entry: dict[str, Any]) -> bytes:
    first, end = entry["data_offsets"]
    digest = hashlib.blake2b(repr((name, entry["dtype"], entry["shape"])).encode(), digest_size=16)
    last = max(0, end - first - _WINDOW_BYTES)
    for start in sorted({last * at // (_WINDOWS - 1) for at in range(_WINDOWS)}):
        digest.update(os.pread(file, min(_WINDOW_BYTES, end - first - start), base + first + start))
    return digest.digest()


_ROTARY: Final = ("rope_theta", "rope_parameters", "rotary_emb_base", "rotary_dim")
_CHANGING: Final = ("dynamic", "longrope", "su")


def why_not_longer(config: Mapping[str, Any]) -> str:
    """Why positions beyond the config's last one cannot be computed; "" if they can.

    Rotary embeddings of a fixed frequency have any position. Those whose frequencies follow the length would
    make a row depend on its neighbours and on KV that was cached under others; learned positions end.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    if not any(text.get(name) is not None for name in _ROTARY):
        return "its config names no rotary positions, which alone go on for ever"
    for name in ("rope_parameters", "rope_scaling"):
        settings = text.get(name)
        if not isinstance(settings, dict):
            continue
        for kind in (settings, *(value for value in settings.values() if isinstance(value, dict))):
            found = kind.get("rope_type", kind.get("type"))
            if found in _CHANGING:
                return f"its rotary positions are {found}: they change with the length"
    return ""
