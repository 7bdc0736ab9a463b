"""Models that classify texts or judge pairs: by a head for classes, or chat models that answer yes or no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from services.engine.device import Device
from services.engine.model.checks import ModelError
from services.engine.model.decoder import CLASSES
from services.engine.model.facts import CLASS_HEAD, ENCODERS, class_labels
from services.engine.model.hf_config import own_architecture
from services.engine.model.loading import Checkpoint
from services.engine.model.paged import PagedModel
from services.engine.model.pooling.encoder import EncoderModel, load_body
from services.engine.model.pooling.pooler import Activation, DecoderPooler, Pooler

# Where sentence-transformers keeps what a cross-encoder's logits go through, now and before.
_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": Activation.SIGMOID,
    "torch.nn.modules.activation.Softmax": Activation.SOFTMAX,
    "torch.nn.modules.linear.Identity": Activation.NONE,
}
_PROBLEMS = {
    "regression": Activation.NONE,
    "single_label_classification": Activation.SOFTMAX,
    "multi_label_classification": Activation.SIGMOID,
}


class HeadedEncoder(Pooler):
    """An encoder with a head: one logit for each class."""

    def __init__(self, encoder: EncoderModel, activation: Activation) -> None:
        self._encoder = encoder
        self.activation = activation
        self.dim = int(encoder.model.config.num_labels)
        self.vocab_size = int(encoder.model.config.vocab_size)
        self.dtype = encoder.dtype

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self._encoder.model,)

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._encoder.output(tokens, lengths, seconds).logits.float()
        return logits


class YesNoPooler(Pooler):
    """By how much a decoder's logit of yes is above that of no.

    Its sigmoid is the probability of yes in a softmax over these two alone.
    """

    dim = 1
    activation = Activation.SIGMOID

    def __init__(self, model: PagedModel, states: DecoderPooler, yes: int, no: int) -> None:
        """`states` gives the state of each document's last token."""
        self._model = model
        self._states = states
        self._yes, self._no = yes, no
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._model.modules

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        self._states.on_chunk = self.on_chunk
        hidden = self._states.pool(tokens, lengths, seconds).to(self._model.dtype)
        logits = self._model.logits(hidden).float()
        # exp(y) / (exp(y) + exp(n)) cannot overflow as the sigmoid of this.
        return logits[:, self._yes : self._yes + 1] - logits[:, self._no : self._no + 1]


class HeadedDecoder(Pooler):
    """A decoder with a head: one logit for each class, from the state of the last token."""

    def __init__(self, states: DecoderPooler, head: torch.Tensor, activation: Activation) -> None:
        """`states` gives that state; head [classes, hidden] of float32, on its device."""
        self._states = states
        self._head = head
        self.activation = activation
        self.dim = head.shape[0]
        self.vocab_size = states.vocab_size
        self.dtype = states.dtype

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._states.modules

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        self._states.on_chunk = self.on_chunk
        return self._states.pool(tokens, lengths, seconds) @ self._head.T


def add_class_head(directory: Path, raw: dict[str, Any], states: DecoderPooler, device: Device) -> Pooler:
    """The decoder of a checked directory with its head for classes. Raises ModelError."""
    with Checkpoint(directory) as checkpoint:
        head = checkpoint.read(CLASSES) if CLASSES in checkpoint.names else None
    shape = (len(class_labels(raw)), states.dim)
    if head is None or head.shape != shape:
        found = "no" if head is None else f"a {tuple(head.shape)}"
        raise ModelError(f"model {directory} has {found} tensor {CLASSES}, where config.json says {shape}")
    return HeadedDecoder(states, device.memory.to_device(head.float()), _activation(raw, shape[0]))


def check_class_head(directory: Path, raw: dict[str, Any], backend: str) -> None:
    """Raise ModelError if a decoder with a head for classes is to be run by transformers, or is not the one
    of its model type."""
    if backend == "transformers":
        raise ModelError("model-backend transformers does not run decoders with a head for classes: set auto")
    name = str(raw["architectures"][0])
    own = own_architecture(raw["model_type"])
    if own is None or own.removesuffix("ForCausalLM") + CLASS_HEAD != name:
        raise ModelError(f"model {directory} is a {name} of type {raw['model_type']}, which is not supported")


def load_headed(directory: Path, raw: dict[str, Any], device: Device, *, dtype: str) -> HeadedEncoder:
    """Load a checked directory with the parsed config `raw`, of a type in ENCODERS. Raises ModelError."""
    encoder = load_body(directory, raw, device, ENCODERS[raw["model_type"]][1], dtype=dtype)
    return HeadedEncoder(encoder, _activation(raw, int(encoder.model.config.num_labels)))


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


def _activation(config: dict[str, Any], classes: int) -> Activation:
    """Return the activation of logits: the config's for sentence-transformers, or by its kind of problem.

    By default one logit goes through a sigmoid, as in sentence-transformers, and several through a softmax.
    """
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None and named not in _ACTIVATIONS:
        raise ModelError("the checkpoint's activation function is none of sigmoid, softmax and identity")
    problem = config.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ModelError(f"the checkpoint's problem_type is none of {', '.join(_PROBLEMS)}")
    chosen = Activation.SOFTMAX
    if named is not None:
        chosen = _ACTIVATIONS[named]
    elif problem is not None:
        chosen = _PROBLEMS[problem]
    # A softmax over one logit is 1, whatever it is.
    return Activation.SIGMOID if chosen is Activation.SOFTMAX and classes == 1 else chosen
