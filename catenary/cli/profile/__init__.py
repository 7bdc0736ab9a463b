"""`catenary profile`: where the time of a running engine's steps goes."""

from __future__ import annotations

from catenary.cli.profile.config import ProfileConfig
from catenary.cli.profile.run import end_on_sigterm, run_profile

__all__ = ["ProfileConfig", "end_on_sigterm", "run_profile"]
