"""What every Catenary service and client imports."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
