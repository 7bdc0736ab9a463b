"""Static shapes that forwards are padded to. Pure."""

from __future__ import annotations

from services.engine.bucketing.bucket import Bucket

__all__ = ["Bucket"]
