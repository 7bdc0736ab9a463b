"""`catenary profile`: where the time of a running engine's steps goes."""

from __future__ import annotations

from catenary_apps.profile.config import ProfileConfig
from catenary_apps.profile.run import run_profile, run_profile_command

__all__ = ["ProfileConfig", "run_profile", "run_profile_command"]
