"""The base that every Catenary service and client imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catenary.version import __version__

if TYPE_CHECKING:
    from catenary.client import AsyncClient, Client
    from catenary_apps.llm import (
        LLM,
        BeamSearchParams,
        GuidedDecodingParams,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
    )

# Before anything that an older Python cannot import. Gaudi images for Ubuntu 22.04 have 3.10.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "Catenary needs Python 3.11 or 3.12, and this is Python {}.{}. On Gaudi take one of the vendor's "
        "images for Ubuntu 24.04 (Python 3.12) or Red Hat 9 (3.11), software 1.22 to 1.24, such as "
        "gaudi-docker/1.24.0/ubuntu24.04/habanalabs/pytorch-installer-2.10.0".format(*sys.version_info[:2])
    )

# Imported when they are asked for: the services, which import this package too, have no use for them, and
# catenary_apps stands above this package.
_EXPORTS = {
    "AsyncClient": "catenary.client",
    "Client": "catenary.client",
    "BeamSearchParams": "catenary_apps.llm",
    "GuidedDecodingParams": "catenary_apps.llm",
    "LLM": "catenary_apps.llm",
    "PoolingParams": "catenary_apps.llm",
    "SamplingParams": "catenary_apps.llm",
    "StructuredOutputsParams": "catenary_apps.llm",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "BeamSearchParams",
    "Client",
    "GuidedDecodingParams",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'catenary' has no attribute {name!r}")
    if module.startswith("catenary_apps"):
        _check_own_packages(name)
    return getattr(importlib.import_module(module), name)


def _check_own_packages(name: str) -> None:
    """Raise ImportError if a package of the caller's stands before one of ours that `name` needs."""
    here = Path(__file__).resolve().parents[1]
    for package in ("catenary_apps", "services", "gateway"):
        found = importlib.util.find_spec(package)
        places = {Path(place).resolve() for place in (found and found.submodule_search_locations) or ()}
        if found is not None and here / package not in places:
            other = next(iter(places), found.origin)
            raise ImportError(
                f"catenary.{name} needs Catenary's package {package!r}, and {other} has the same name and is "
                "found first: rename it, or start the program from another directory"
            )
