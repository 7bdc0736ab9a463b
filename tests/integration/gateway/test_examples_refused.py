"""An example that reaches no service, or finds no secret, ends with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

EXAMPLES = ROOT / "examples"
NOWHERE = "127.0.0.1:1"


def run(name: str, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    return line


@pytest.mark.parametrize("name", ["python_client.py", "grpc_client.py"])
def test_grpc_examples(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    assert "No such file" in run(name, "--secret-file", str(secret))
    secret.write_text("x")
    addresses = ("--router", NOWHERE, "--tokenizer", NOWHERE)
    assert NOWHERE in run(name, "--secret-file", str(secret), *addresses)


@pytest.mark.parametrize("name", ["openai_client.py", "langchain_client.py"])
def test_http_examples(name: str) -> None:
    assert "--base-url" in run(name, "--base-url", f"http://{NOWHERE}/v1")
