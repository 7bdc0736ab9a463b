"""Opens a card: environment, bridge, module, memory of recipes, in the order that the bridge needs."""

from __future__ import annotations

from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.device.hpu.acquiring import acquire
from services.engine.device.hpu.bridge import load_bridge
from services.engine.device.hpu.collector import relax_collector
from services.engine.device.hpu.device import HpuDevice
from services.engine.device.hpu.driver import Driver
from services.engine.device.hpu.environment import spawn_children
from services.engine.device.hpu.probing import parse_switches, probe_kernels
from services.engine.device.hpu.properties import properties_of
from services.engine.device.hpu.recipes import check_given_cache, use_recipe_cache
from services.engine.device.hpu.settings import HpuSettings
from services.engine.device.hpu.topology import bind_near, choose_module
from services.engine.device.hpu.versions import installed
from services.engine.device.modes import ExecutionMode

log = get_logger(__name__)


def open_hpu(mode: ExecutionMode, settings: HpuSettings, *, local_rank: int = 0) -> HpuDevice:
    """Acquires the card of this rank. Raises DeviceError, one line that says what to do."""
    switches = parse_switches(settings.kernels)
    found = installed()
    if settings.recipe_cache is not None and found is not None:
        use_recipe_cache(settings.recipe_cache, found.software, local_rank)
    else:
        check_given_cache()
    module = choose_module(local_rank)
    bridge = load_bridge(mode)
    name = acquire(bridge, Driver(Path("/")))
    properties = properties_of(name)
    spawn_children()
    relax_collector(settings.gc_threshold_multiplier)
    if settings.numa_binding:
        bind_near(module)
    log.info("HPU acquired", card=name, software=bridge.version, mode=mode.value, module=module)
    kernels = probe_kernels(properties, bridge.version, switches)
    return HpuDevice(bridge, properties, mode, settings, kernels)
