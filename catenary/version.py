"""The release of Catenary, beside nothing that would have to be imported with it."""

from __future__ import annotations

__version__ = "0.1.0"
