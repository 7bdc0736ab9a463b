"""Modules that a start of the core loads."""

from __future__ import annotations

import subprocess
import sys

from tests.support.repository import ROOT

PROBE = "import sys, services.engine.core.startup; print('services.engine.model.pooling' in sys.modules)"


def test_an_engine_that_generates_loads_no_encoders() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
