"""What outlives a request: a directory, and databases in it that several gateways of one host may share."""

from __future__ import annotations

from gateway.state.clock import LeaseClock
from gateway.state.database import RESERVE_BYTES, Database
from gateway.state.directory import StateDirectory

__all__ = ["RESERVE_BYTES", "Database", "LeaseClock", "StateDirectory"]
