"""Doubles to test against: an engine that replays a script."""

from __future__ import annotations

import catenary.grpc_environment  # noqa: F401
