"""The fused kernels of an HPU: which are installed, which are safe, and which the operator switched.

Source of names and of where each is safe: gaudi-facts.md 3.3, 3.4 and 4.5. Windows are always given as masks:
the vendor says nowhere whether the window of its kernel counts a query's own position.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError
from services.engine.device.hpu.settings import GAUDI3, HpuProperties, HpuSettings, Softmax

log = get_logger(__name__)

# First software whose adjustment is exact enough, and on Gaudi 3 alone.
_ADJUSTMENT_SINCE = (1, 22, 0, 494)
# FusedKernels that are of no use without another.
_NEEDS = {"sdpa_sinks": "sdpa", "sliced_sdpa": "sdpa", "block_softmax": "block_softmax_adjustment"}
# Arguments of FusedSDPA before those that came later: the window and the sinks.
_SDPA_ARGUMENTS = 13


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """The fused kernels to use; None or False: the same in torch's own operations.

    sdpa: the class FusedSDPA. sdpa_sinks: whether it takes sinks. sliced_sdpa: the operation that gives the
    softmax's maxima and sums with its result. rms_norm: the class FusedRMSNorm. rotary:
    apply_rotary_pos_emb, and rotary_mode its word for rotating halves. experts, block_softmax and
    block_softmax_adjustment: operations of torch.ops.hpu. index_reduce: whether torch's is used.
    """

    sdpa: Any = None
    sdpa_sinks: bool = False
    sliced_sdpa: Any = None
    rms_norm: Any = None
    rotary: Any = None
    rotary_mode: Any = None
    experts: Any = None
    block_softmax: Any = None
    block_softmax_adjustment: Any = None
    index_reduce: bool = False


SWITCHES = tuple(each.name for each in fields(FusedKernels) if each.name != "rotary_mode")
"""Names in the option `kernels`."""


def parse_switches(text: str) -> dict[str, bool]:
    """Read "sdpa=off,block_softmax=on". Raises DeviceError, one line, for anything else."""
    switches: dict[str, bool] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in SWITCHES or value not in ("on", "off"):
            raise DeviceError(
                f"kernels: {part!r} is not understood; write NAME=on or NAME=off with {', '.join(SWITCHES)}"
            )
        if name in switches:
            raise DeviceError(f"kernels: {name} is switched twice")
        switches[name] = value == "on"
    return switches


def probe_kernels(properties: HpuProperties, version: str, switches: Mapping[str, bool]) -> FusedKernels:
    """Return the kernels that are installed and enabled. Raises DeviceError for a missing one."""
    found = _found()
    # The two softmax kernels lose precision where they are not known to be good: off unless asked for.
    if properties is not GAUDI3 or _numbers(version) < _ADJUSTMENT_SINCE:
        found["block_softmax_adjustment"] = _asked_for(found, switches, "block_softmax_adjustment")
    found["block_softmax"] = _asked_for(found, switches, "block_softmax")
    for name, on in switches.items():
        if not on:
            found[name] = None
        elif not found[name]:
            raise DeviceError(f"kernels: {name}=on, but Habana software {version} has no such kernel here")
    for name, needed in _NEEDS.items():
        if found[name] and not found[needed]:
            if switches.get(name):
                raise DeviceError(f"kernels: {name}=on needs {needed}=on")
            found[name] = None
    kernels = FusedKernels(**{name: value for name, value in found.items() if value})
    used = [name for name in SWITCHES if getattr(kernels, name)]
    log.info("HPU kernels", fused=used, plain=[name for name in SWITCHES if name not in used])
    return kernels


def for_model(
    settings: HpuSettings, kernels: FusedKernels, *, float32_scores: bool
) -> tuple[HpuSettings, FusedKernels]:
    """Return settings and kernels for a model, which may need its scores in float32.

    The adjustment takes maxima and sums in the model's type: it is not combined with scores in float32,
    unless it is switched on by name. Raises DeviceError if that is done for a model that cannot have it.
    """
    attention, name = settings.attention, "block_softmax_adjustment"
    if attention.softmax is Softmax.AUTO:
        chosen = Softmax.FP32 if float32_scores else Softmax.FAST
        attention = replace(attention, softmax=chosen)
        log.info("HPU attention", softmax=chosen.value)
    asked = parse_switches(settings.kernels).get(name, False)
    if asked and float32_scores:
        raise DeviceError(
            f"kernels: {name}=on (VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT) rounds too much for this model's "
            "family: leave it out"
        )
    if not asked and (float32_scores or attention.softmax is Softmax.FP32):
        kernels = replace(kernels, block_softmax=None, block_softmax_adjustment=None)
    return replace(settings, attention=attention), kernels


def _asked_for(found: Mapping[str, Any], switches: Mapping[str, bool], name: str) -> Any:
    return found[name] if switches.get(name) else None


def _found() -> dict[str, Any]:
    hpex = "habana_frameworks.torch.hpex"
    sdpa = _attribute(f"{hpex}.kernels", "FusedSDPA")
    mode = _attribute(f"{hpex}.kernels", "RotaryPosEmbeddingMode")
    return {
        "sdpa": sdpa,
        "sdpa_sinks": sdpa is not None and _takes_sinks(sdpa),
        "sliced_sdpa": _operation("sdpa_recomp_fwd"),
        "rms_norm": _attribute(f"{hpex}.normalization", "FusedRMSNorm"),
        "rotary": None if mode is None else _attribute(f"{hpex}.kernels", "apply_rotary_pos_emb"),
        "rotary_mode": getattr(mode, "BLOCKWISE", None),
        "experts": _operation("mixture_of_experts"),
        "block_softmax": _operation("block_softmax"),
        "block_softmax_adjustment": _operation("block_softmax_adjustment"),
        # All software from 1.22 on has it (gaudi-facts.md 3.3).
        "index_reduce": True,
    }


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _operation(name: str) -> Any:
    return getattr(torch.ops.hpu, name, None)


def _takes_sinks(sdpa: Any) -> bool:
    """Return whether two arguments follow the known ones: window and sinks."""
    function = sdpa.forward if hasattr(sdpa, "forward") else sdpa.apply
    names = [name for name in inspect.signature(function).parameters if name != "ctx"]
    return len(names) >= _SDPA_ARGUMENTS + 2


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])
