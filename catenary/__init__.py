"""What every Catenary service and client imports."""

from __future__ import annotations

import os

# C-core writes each GOAWAY of an ordered shutdown to stderr, past the logs. It reads this when grpc is
# imported, so it is set by the package that everyone imports before.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"

__all__ = ["__version__"]
