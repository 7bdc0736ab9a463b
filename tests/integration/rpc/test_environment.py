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
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "module",
    [
        "catenary_apps.cli.main",
        "catenary_testing.engine.__main__",
        "gateway.__main__",
        "services.engine.__main__",
        "services.router.__main__",
        "services.tokenizer.__main__",
    ],
)
def test_grpc_finds_its_environment(module: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    # The command loads what opens channels when it is asked for.
    command = [sys.executable, "-c", PROGRAM, module, "catenary.rpc"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "0 ERROR\n"


def test_the_environment_of_a_program_with_the_client_stays() -> None:
    program = """
import os
before = dict(os.environ)
import catenary
catenary.Client, catenary.AsyncClient
assert os.environ == before, {name for name in os.environ if os.environ[name] != before.get(name)}
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
