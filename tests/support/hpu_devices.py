"""HPU devices on the simulated card, by what they compute attention and the rest of a layer with."""

from __future__ import annotations

from services.engine.device import ExecutionMode
from services.engine.device.hpu import GAUDI2, GAUDI3, AttentionSettings, HpuDevice, HpuSettings
from services.engine.device.hpu.bridge import load_bridge
from services.engine.device.hpu.fused import SWITCHES, parse_switches, probe_kernels

PLAIN = ",".join(f"{name}=off" for name in SWITCHES)
# Name: (switches, whether on a Gaudi 2, attention settings).
_CHOICES = {
    "default": ("", False, AttentionSettings()),
    "gaudi2": ("", True, AttentionSettings()),
    "plain": (PLAIN, False, AttentionSettings()),
    "block_softmax": ("block_softmax=on", False, AttentionSettings()),
    "sliced": ("index_reduce=off", True, AttentionSettings(slice_from=8, slice_chunk=7)),
}
CHOICES = tuple(_CHOICES)


def open_choice(name: str) -> HpuDevice:
    """A device of this choice, on the card that is there, without what opening does beside."""
    switches, old, attention = _CHOICES[name]
    properties = GAUDI2 if old else GAUDI3
    bridge = load_bridge(ExecutionMode.EAGER)
    kernels = probe_kernels(properties, bridge.version, parse_switches(switches))
    settings = HpuSettings(attention=attention, kernels=switches)
    return HpuDevice(bridge, properties, ExecutionMode.EAGER, settings, kernels)
