"""Put the fake package where imports find it, with the metadata that says what is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from services.engine.device.sim.card import card

_HERE: Final = "services.engine.device.sim.habana"
# Name in the vendor's package: module here; None for one that only holds others.
_MODULES: Final[dict[str, str | None]] = {
    "habana_frameworks": None,
    "habana_frameworks.torch": None,
    "habana_frameworks.torch.core": "core",
    "habana_frameworks.torch.hpu": "hpu",
    "habana_frameworks.torch.hpu.metrics": "metrics",
    "habana_frameworks.torch.hpu.graphs": "graphs",
    "habana_frameworks.torch.hpex": None,
    "habana_frameworks.torch.hpex.kernels": "kernels",
    "habana_frameworks.torch.hpex.normalization": "normalization",
    "habana_frameworks.torch.internal": None,
    "habana_frameworks.torch.internal.bridge_config": "bridge_config",
    "habana_frameworks.torch.utils": None,
    "habana_frameworks.torch.utils.internal": "internal",
    "habana_frameworks.torch.utils.experimental": "experimental",
}


def install_package() -> None:
    """After this `import habana_frameworks.torch` works as with the vendor's."""
    if "habana_frameworks" in sys.modules:
        return
    for name, here in _MODULES.items():
        module = ModuleType(name) if here is None else importlib.import_module(f"{_HERE}.{here}")
        # transformers and others look for the package by its spec.
        if here is None:
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.meta_path.append(_Finder())


# Where torch.compile finds backends that nobody registered, without loading dynamo before it is needed.
_ENTRY_POINTS: Final = (
    "[torch_dynamo_backends]\nhpu_backend = services.engine.device.sim.compile_backend:hpu_backend\n"
)
_ANY: Final = DistributionFinder.Context()


class _Plugin(Distribution):
    """Metadata of the vendor's plugin, as pip would have it."""

    def read_text(self, filename: str) -> str | None:
        if filename == "entry_points.txt":
            return _ENTRY_POINTS
        if filename != "METADATA":
            return None
        release = torch.__version__.split("+")[0]
        return (
            f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {card().settings.version}\n"
            f"Requires-Dist: torch (=={release})\n"
        )

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


class _Finder(DistributionFinder):
    """Finds the plugin's metadata, and no module."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterable[Distribution]:
        names = (None, "habana-torch-plugin", "habana_torch_plugin")
        return [_Plugin()] if context.name in names else []
