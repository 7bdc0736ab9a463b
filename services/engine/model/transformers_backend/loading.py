"""Load a checked model directory with transformers, probe it, and drive it as the runner does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from services.engine.device import Device, DeviceError, Execution
from services.engine.model.checks import ModelError, check_directory, read_config
from services.engine.model.hf_config import (
    check_weights_fit,
    checkpoint_dtype,
    first_line,
    load_config,
    own_architecture,
)
from services.engine.model.paged import DecodeInputs, LayerCache, PagedModel, PrefillInputs
from services.engine.model.transformers_backend.modules import (
    IMPLEMENTATION,
    Probe,
    UnsupportedAttention,
    attach_cache,
    use_static_experts,
)


@dataclass
class BodyOutput(MoeModelOutputWithPast):
    """Output of a body, as heads read it or pass it on. All but the hidden states is None."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class HiddenStates(nn.Module):
    """Stands in for a model's body: it returns the hidden states that it is given as embeddings.

    So a causal model's own forward, with this in its body's place, is its head: the projection and whatever
    else the architecture does to the logits.
    """

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> BodyOutput:
        """inputs_embeds [1, R, H] is the body's last hidden state. Everything else is ignored."""
        return BodyOutput(last_hidden_state=inputs_embeds)


def take_body(model: Any) -> Any:
    """Take the decoder stack out of `model`, which becomes its head. Returns the stack."""
    body = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is body)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, HiddenStates())
    return body


def head_logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [R, H] -> logits [R, vocab] by a model whose body was taken."""
    logits: torch.Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
    return logits[0]


_DYNAMIC = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive"})
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class DynamicShape(Exception):
    """A forward with an operation whose shape depends on data. The text is the operation's name."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXED and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # With a condition alone it lists where that holds.
        listed = name == "where" and len(args) == 1
        if name in _DYNAMIC or listed or by_mask:
            raise DynamicShape("an index by a mask" if by_mask else name)
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_dynamic_shapes() -> Iterator[None]:
    """Within it, such an operation raises DynamicShape."""
    watch: Any = _Watch
    with watch():
        yield


_TOKENS = 4


def unsupported(model: Any, reason: str) -> ModelError:
    """The error for an architecture that cannot be served."""
    return ModelError(f"architecture {type(model).__name__} is not supported: {reason}")


def probe_tokens(device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens and their positions, on the device."""
    tokens = torch.zeros(_TOKENS, dtype=torch.int64, device=device.torch_device)
    return tokens, torch.arange(_TOKENS, device=device.torch_device)


@torch.inference_mode()
def probe_model(model: Any, device: Device) -> tuple[Probe, torch.Tensor]:
    """Run the whole model on `probe_tokens`. Returns what its layers are, and its logits.

    Raises ModelError for attention that is not implemented, is not paged or hides its window, and for shapes
    that depend on data.
    """
    probe = Probe(device.kernels)
    tokens, positions = probe_tokens(device)
    try:
        with refuse_dynamic_shapes():
            output = model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                paged=probe,
            )
    except UnsupportedAttention as error:
        raise unsupported(model, f"it needs {error}") from None
    except DynamicShape as error:
        raise unsupported(model, f"the shapes of its tensors depend on data ({error})") from None
    logits: torch.Tensor = output.logits[0]
    config = model.config.get_text_config()
    found, count = len(probe.layers), config.num_hidden_layers
    if found != count or logits.shape[0] != _TOKENS:
        raise unsupported(model, f"{found} of its {count} layers have attention that can be paged")
    hidden = _hidden_window(probe, config)
    if hidden is not None:
        raise unsupported(model, f"layer {hidden} hides its sliding window")
    return probe, logits


def _hidden_window(probe: Probe, config: Any) -> int | None:
    """A layer whose window the config names and the attention is not told: it is put into a mask there."""
    windows = [probe.layers[index].window for index in sorted(probe.layers)]
    types = getattr(config, "layer_types", None)
    if types is None:
        # A class that does not know the key leaves it as it is, unused.
        known = hasattr(type(config), "sliding_window")
        used = known and config.sliding_window and getattr(config, "use_sliding_window", True)
        return 0 if used and not any(windows) else None
    pairs = zip(types, windows, strict=True)
    return next(
        (
            index
            for index, (kind, window) in enumerate(pairs)
            if kind == "sliding_attention" and window is None
        ),
        None,
    )


class TransformersModel(PagedModel):
    """Wraps a loaded causal language model whose attention implementation is ours.

    Batches are passed flattened to one row, [1, T]. Raises ModelError for what cannot be served so.
    """

    backend = "transformers"

    def __init__(self, model: Any, device: Device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype
        self._weight_bytes = _weight_bytes(model)
        probe, whole = probe_model(model, device)
        self._body, self._head = take_body(model), model
        self.hidden_size = self._check_split(whole)
        self.vocab_size = int(whole.shape[-1])
        self.layers = tuple(probe.layers[index] for index in sorted(probe.layers))
        self._modules = [probe.modules[index] for index in sorted(probe.modules)]
        for index, layer in enumerate(self._layer_modules()):
            layer.register_forward_hook(partial(_layer_done, device.execution, index))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self._head,)

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def compile_parts(self, *, norms_and_head: bool) -> None:
        # Which of its other modules make the final norm and the head is the architecture's own affair.
        for module in self._layer_modules():
            module.forward = self.device.execution.compile(module.forward)

    def compile_whole(self) -> None:
        self._body.forward = self.device.execution.compile(self._body.forward)

    def _layer_modules(self) -> list[Any]:
        attentions = {id(module) for module in self._modules}
        return [
            module
            for module in self._body.modules()
            if any(id(child) in attentions for child in module.children())
        ]

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for module, cache in zip(self._modules, caches, strict=True):
            attach_cache(module, cache)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        return _hidden(self._body, tokens, positions, inputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(self._head, hidden)

    @torch.inference_mode()
    def _check_split(self, whole: torch.Tensor) -> int:
        """Body and head, one after the other, must give what the whole model gave.

        Returns the hidden size.
        """
        hidden = _hidden(self._body, *probe_tokens(self.device), Probe(self.device.kernels))
        try:
            split = self.logits(hidden)
        except Exception as error:
            raise unsupported(self._head, f"its head does not run alone: {first_line(error)}") from None
        if split.shape != whole.shape or not torch.allclose(split, whole, rtol=1e-3, equal_nan=True):
            raise unsupported(self._head, "its head is not a function of hidden states")
        return int(hidden.shape[-1])


def _hidden(
    body: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    inputs: PrefillInputs | DecodeInputs | Probe,
) -> torch.Tensor:
    output = body(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, paged=inputs
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0]


def _layer_done(execution: Execution, index: int, *call: object) -> None:
    execution.layer_done(index)


def _weight_bytes(model: Any) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# By model type, what to use instead of checkpoints that bring their own code.
_INSTEAD = {
    "baichuan": "use a checkpoint that was converted to the llama format",
    "chatglm": "use a checkpoint of the model types glm or glm4",
    "internlm": "use a checkpoint of the model type internlm3, or one converted to the llama format",
    "internlm2": "use a checkpoint of the model type internlm3, or one converted to the llama format",
}


def model_class(directory: Path, config: dict[str, Any]) -> type[PreTrainedModel]:
    """The class that runs this checkpoint, from transformers alone: a checkpoint's own code is never
    imported.

    Raises ModelError with the architecture's name.
    """
    name = _architecture(config)
    known = {value for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(value, str)}
    if name not in known:
        if config.get("auto_map"):
            instead = _INSTEAD.get(config["model_type"], "use a checkpoint in transformers' own format")
            raise ModelError(
                f"model {directory} needs code from its own repository ({name}); "
                f"remote code is never run here: {instead}"
            )
        raise ModelError(
            f"architecture {name} is not supported: transformers {transformers.__version__} has no causal "
            "language model of that name"
        )
    found: Any = getattr(transformers, name)
    if not found.is_backend_compatible():
        raise ModelError(f"architecture {name} is not supported: its attention cannot be paged")
    if getattr(found, "_is_stateful", False):
        raise ModelError(f"architecture {name} is not supported: it keeps a recurrent state beside its KV")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"architecture {name} is not supported: it is an encoder-decoder")
    result: type[PreTrainedModel] = found
    return result


def load_model_config(
    directory: Path, raw: dict[str, Any], model: type[PreTrainedModel], max_model_len: int | None
) -> PreTrainedConfig:
    """Parse config.json for the class, which is `model_class`'s, and check it. Raises ModelError."""
    model_type = raw["model_type"]
    kind: Any = model.config_class
    if own_architecture(model_type) == model.__name__:
        # Its own config, where the class is another type's.
        kind = CONFIG_MAPPING[model_type]
    return load_config(directory, kind, model.__name__, max_model_len)


def _architecture(config: dict[str, Any]) -> str:
    model_type = config["model_type"]
    own = own_architecture(model_type) or model_type
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return own
    # A model type without classes of its own: internlm3 runs as llama, whatever its checkpoints call that.
    found: Any = getattr(transformers, own, None)
    borrowed = found is not None and found.config_class.model_type != model_type
    return own if borrowed and names[0].endswith("ForCausalLM") else names[0]


# Not annotated by transformers.
_logging: Any = logging

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


def load_model(
    directory: Path, device: Device, *, dtype: str, max_model_len: int | None
) -> TransformersModel:
    """Load the model of a Hugging Face directory in `dtype` (auto, float32, bfloat16, float16).

    `max_model_len` None means the model's own. Raises ModelError with one readable line, InsufficientMemory.
    """
    _be_quiet()
    raw = check_directory(directory)
    kind: Any = model_class(directory, raw)
    config = load_model_config(directory, raw, kind, max_model_len)
    model, chosen = load_module(kind, directory, config, device, dtype=dtype, attention=IMPLEMENTATION)
    use_static_experts(model, device.kernels)
    model.to(device.torch_device).eval().requires_grad_(False)
    return TransformersModel(model, device, chosen)


def load_module(
    kind: Any, directory: Path, config: Any, device: Device, *, dtype: str, attention: str, **options: Any
) -> tuple[Any, torch.dtype]:
    """The module of class `kind` with a directory's weights, as the class loads it; and its dtype.

    `attention` names a registered implementation; `options` go to the class. Raises ModelError, or
    InsufficientMemory before anything is read.
    """
    _be_quiet()
    try:
        chosen = device.kernels.choose_dtype(dtype, checkpoint_dtype(config.dtype))
        check_weights_fit(directory, read_config(directory), dtype, device, native=False)
    except DeviceError as error:
        raise ModelError(str(error)) from None
    try:
        model, report = kind.from_pretrained(
            directory,
            config=config,
            dtype=chosen,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise ModelError(f"model {directory} cannot be loaded: {first_line(error)}") from None
    missing = sorted(str(name) for name in report["missing_keys"])
    if missing:
        raise ModelError(f"model {directory} has no weights for {missing[0]} and {len(missing) - 1} more")
    for module in model.modules():
        # It looks for padding among the tokens of each forward: a device would have to be waited for.
        if hasattr(module, _PADDING_CHECK):
            setattr(module, _PADDING_CHECK, _warn_of_nothing)
    return model, chosen


def _be_quiet() -> None:
    """No bars, and no report of weights that the class has no place for: what is missing is an error here."""
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()


def _warn_of_nothing(*arguments: object) -> None:
    return
