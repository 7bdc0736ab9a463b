"""`catenary doctor`: whether a host is set up for Gaudi, and what to do if it is not."""

from __future__ import annotations

from catenary_apps.doctor.run import DoctorConfig, run_doctor

__all__ = ["DoctorConfig", "run_doctor"]
