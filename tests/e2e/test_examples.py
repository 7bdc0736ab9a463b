"""The examples, as a person runs them, on the real small model. Those of the openai client and of plain
gRPC run in test_up.py, against `catenary up`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.e2e_stack import ProcessStack
from tests.support.repository import ROOT


def run(*command: str) -> str:
    """What a command prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


async def test_langchain(stack: ProcessStack):
    output = run(sys.executable, "examples/langchain_client.py", "--base-url", f"{stack.address}/v1")
    assert output.count("Paris") >= 2
    assert "is_capital=" in output


async def test_tools(stack: ProcessStack):
    command = (sys.executable, "examples/tools_client.py", "--base-url", f"{stack.address}/v1")
    # Whether so small a model calls anything is its own affair; it is asked, and answers.
    assert run(*command).strip()
    called = run(*command, "--required", "Weather in Paris?").splitlines()
    assert called[0].startswith("get_weather({")
    assert '-> {"city": ' in called[0]


async def test_curl(stack: ProcessStack):
    blocks = run("examples/curl.sh", f"{stack.address}/v1").split("# ")[1:]
    assert [block.splitlines()[0] for block in blocks] == [
        "a chat",
        "as a stream",
        "JSON by a schema",
        "a text, with log probabilities",
        "the Responses API",
    ]
    whole = [json.loads(blocks[place].splitlines()[1]) for place in (0, 2, 3, 4)]
    assert "Paris" in whole[0]["choices"][0]["message"]["content"]
    assert set(json.loads(whole[1]["choices"][0]["message"]["content"])) == {"name", "capital"}
    assert len(whole[2]["choices"][0]["logprobs"]["tokens"]) == 4
    assert "Paris" in whole[3]["output"][0]["content"][0]["text"]
    assert blocks[1].rstrip().endswith("data: [DONE]")


async def test_python_client(stack: ProcessStack, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text(stack.secrets.client)
    addresses = ("--router", stack.socket("router"), "--tokenizer", stack.socket("tokenizer"))
    output = run(sys.executable, "examples/python_client.py", "--secret-file", str(secret), *addresses)
    assert "Paris" in output


async def test_offline(stack: ProcessStack):
    output = run(sys.executable, "examples/offline.py", "--dtype", "float32")
    lines = output.splitlines()
    assert len(lines) == 5
    assert "Paris" in lines[0]
    assert "Paris" in lines[3]
    assert lines[4] in ("positive", "negative")
