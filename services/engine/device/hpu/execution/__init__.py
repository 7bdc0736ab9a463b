"""The four ways in which an HPU executes forwards."""

from __future__ import annotations

from services.engine.device.hpu.execution.choice import execution_for

__all__ = ["execution_for"]
