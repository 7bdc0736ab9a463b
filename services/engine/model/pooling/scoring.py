"""Models that judge a query with a document: cross-encoders, and chat models that answer yes or no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from services.engine.device import Device
from services.engine.model.errors import ModelError
from services.engine.model.paged import PagedModel
from services.engine.model.pooling.decoder import DecoderPooler
from services.engine.model.pooling.encoder import EncoderModel, load_body
from services.engine.model.pooling.pooler import Pooler
from services.engine.model.tasks import ENCODERS

# Where sentence-transformers keeps what a cross-encoder's one logit goes through, now and before.
_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": True,
    "torch.nn.modules.linear.Identity": False,
}


class CrossEncoder(Pooler):
    """An encoder with a head for one class: the score is its logit, or the logit's sigmoid."""

    dim = 1

    def __init__(self, encoder: EncoderModel, *, sigmoid: bool) -> None:
        self._encoder = encoder
        self._sigmoid = sigmoid
        self.vocab_size = int(encoder.model.config.vocab_size)
        self.dtype = encoder.dtype

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._encoder.output(tokens, lengths, seconds).logits.float()
        return logits.sigmoid() if self._sigmoid else logits


class YesNoPooler(Pooler):
    """The probability that a decoder answers yes and not no: softmax over these two logits alone."""

    dim = 1

    def __init__(self, model: PagedModel, states: DecoderPooler, yes: int, no: int) -> None:
        """`states` gives the state of each document's last token."""
        self._model = model
        self._states = states
        self._yes, self._no = yes, no
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        self._states.on_chunk = self.on_chunk
        hidden = self._states.pool(tokens, lengths, seconds).to(self._model.dtype)
        logits = self._model.logits(hidden).float()
        # exp(y) / (exp(y) + exp(n)), which cannot overflow so.
        difference = logits[:, self._yes : self._yes + 1] - logits[:, self._no : self._no + 1]
        return difference.sigmoid()


def load_cross_encoder(directory: Path, raw: dict[str, Any], device: Device, *, dtype: str) -> CrossEncoder:
    """Loads a checked directory with the parsed config `raw`, of a type in ENCODERS. Raises ModelError."""
    encoder = load_body(directory, raw, device, ENCODERS[raw["model_type"]][1], dtype=dtype)
    labels = int(encoder.model.config.num_labels)
    if labels != 1:
        raise ModelError(f"model {directory} tells {labels} classes apart; a score needs a head with one")
    return CrossEncoder(encoder, sigmoid=_sigmoid(raw))


def yes_and_no(directory: Path) -> tuple[int, int]:
    """The token ids of the two answers. Raises ModelError if the tokenizer has no single token for one."""
    try:
        tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # the library raises bare Exception
        raise ModelError(f"{directory / 'tokenizer.json'} is missing or not a tokenizer") from None
    ids = [list(tokenizer.encode(word, add_special_tokens=False).ids) for word in ("yes", "no")]
    if any(len(found) != 1 for found in ids) or ids[0] == ids[1]:
        raise ModelError(f"the tokenizer of {directory} has no tokens yes and no, which a score is made of")
    return int(ids[0][0]), int(ids[1][0])


def _sigmoid(config: dict[str, Any]) -> bool:
    """Whether the score is the logit's sigmoid, as in sentence-transformers unless the config says other."""
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return True
    if named not in _ACTIVATIONS:
        raise ModelError("the checkpoint's activation function is neither sigmoid nor identity")
    return _ACTIVATIONS[named]
