"""The async client of Catenary's gRPC side."""

from __future__ import annotations

from catenary.client.client import CatenaryClient

__all__ = ["CatenaryClient"]
