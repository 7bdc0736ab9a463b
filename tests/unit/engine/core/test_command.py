"""A core's modules are those of the process that starts it, wherever that was started."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("flags", [(), ("-P",)])
def test_a_core_looks_for_modules_where_its_servicer_does(flags: tuple[str, ...]) -> None:
    program = "from services.engine.servicer.core import CORE_COMMAND; print(*CORE_COMMAND[1:])"
    result = subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [*flags, "-m", "services.engine.core"]
