"""What every Catenary service and client imports."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catenary.client import AsyncClient, Client
    from catenary.llm import (
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

# What gRPC's C-core reads when grpc is imported is set by the package that everyone imports before. It writes
# each GOAWAY of an ordered shutdown to stderr, past the logs. And it prepares for forks: processes are only
# spawned here, so there is nothing for its handlers to do but to write a line at each.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its event engine reads sockets in threads of its own, which hand each message on to the one that waits for
# it. Without it that one reads by itself, and a message takes about a seventh less time. Whoever sets the
# variable, if to nothing, has the engine.
_NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
os.environ.setdefault("GRPC_EXPERIMENTS", _NO_EVENT_ENGINE)

__version__ = "0.1.0"

# Imported when they are asked for: the services, which import this package too, have no use for them.
_EXPORTS = {
    "AsyncClient": "catenary.client",
    "Client": "catenary.client",
    "BeamSearchParams": "catenary.llm",
    "GuidedDecodingParams": "catenary.llm",
    "LLM": "catenary.llm",
    "PoolingParams": "catenary.llm",
    "SamplingParams": "catenary.llm",
    "StructuredOutputsParams": "catenary.llm",
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
    return getattr(importlib.import_module(module), name)
