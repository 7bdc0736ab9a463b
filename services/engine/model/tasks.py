"""What a checkpoint is served for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from catenary.schema import MAX_LABEL_LENGTH, MAX_LABELS
from services.engine.model.errors import ModelError

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
    """Whether a checkpoint has a head for classes of texts."""
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
