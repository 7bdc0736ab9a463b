"""gRPC reads its environment when it is imported: every program must have set it by then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), os.environ.get("GRPC_VERBOSITY"))

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "catenary.client",
        "catenary.cli.up.deployment",
        "gateway.__main__",
        "gateway.app",
        "services.engine.__main__",
        "services.engine.app",
        "services.router.app",
        "services.router.__main__",
        "services.tokenizer.__main__",
        "services.tokenizer.app",
    ],
)
def test_grpc_finds_its_environment(module: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", PROGRAM, module]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "0 ERROR\n"
