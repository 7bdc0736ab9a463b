"""What every Catenary service and client imports."""

from __future__ import annotations

import os

# What gRPC's C-core reads when grpc is imported is set by the package that everyone imports before. It writes
# each GOAWAY of an ordered shutdown to stderr, past the logs. And it prepares for forks: processes are only
# spawned here, so there is nothing for its handlers to do but to write a line at each.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"

__all__ = ["__version__"]
