"""What a checkpoint is served for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.engine.model.errors import ModelError

# By model type: the class of the body, that of the body with a head for classes, and whether positions begin
# after the padding's id, as RoBERTa's do.
ENCODERS = {
    "bert": ("BertModel", "BertForSequenceClassification", False),
    "roberta": ("RobertaModel", "RobertaForSequenceClassification", True),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaForSequenceClassification", True),
}


class Task(StrEnum):
    """Names are those of the contract's ModelTask."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


def find_task(directory: Path, config: Mapping[str, Any], wanted: str = "auto") -> Task:
    """The task of a checked directory with this config: the one that is wanted, if the checkpoint allows it.

    auto: an encoder with a head for classes scores, other encoders and directories of sentence-transformers
    embed, everything else generates. Raises ModelError with one readable line.
    """
    encoder = config["model_type"] in ENCODERS
    names = config.get("architectures")
    classifies = isinstance(names, list) and str(names[:1]).endswith("ForSequenceClassification']")
    if classifies and not encoder:
        raise ModelError(
            f"model {directory} is a decoder with a head for classes, which is not supported: rerankers are "
            "encoders with one, or chat models that answer yes or no (task score)"
        )
    if wanted == "auto":
        if classifies:
            return Task.SCORE
        return Task.EMBED if encoder or (directory / "modules.json").is_file() else Task.GENERATE
    task = Task(wanted)
    if task is Task.GENERATE and encoder:
        raise ModelError(f"model {directory} is an encoder: it does not generate")
    if task is Task.SCORE and encoder and not classifies:
        raise ModelError(f"model {directory} has no head for scores; its task is embed")
    return task
