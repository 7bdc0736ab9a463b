"""`catenary up` as a person runs it: the real model, the real processes, kill and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.certificates import make_authority, make_certificate
from tests.support.repository import ROOT
from tests.support.up import MODEL, QUESTION, Up, descendants, processes, two_free_ports, wait_for

pytestmark = pytest.mark.model

START_S = 150.0
STOP_S = 45.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"))
    try:
        running.request_line = running.line_with("try it: ", START_S)  # type: ignore[attr-defined]
        assert f"{running.url}/v1 is served" in running.line_with("ready in", START_S)
        yield running
    finally:
        running.close()


def test_a_request_is_shown_that_answers(up: Up) -> None:
    line: str = up.request_line  # type: ignore[attr-defined]
    words = shlex.split(line[line.index("curl ") :])
    assert words[1] == f"{up.url}/v1/chat/completions"
    body = words[words.index("-d") + 1]
    response = httpx2.post(words[1], content=body, headers={"Content-Type": "application/json"}, timeout=120)
    assert response.status_code == 200
    assert "Paris" in response.json()["choices"][0]["message"]["content"]
    answer = up.ask()
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_plain_grpc_client(up: Up) -> None:
    secret = re.search(r"secret in (\S+)", "\n".join(up.lines))
    assert secret is not None
    ports = f"--router 127.0.0.1:{up.router_port} --tokenizer 127.0.0.1:{up.tokenizer_port}"
    command = [
        sys.executable,
        str(ROOT / "examples/grpc_client.py"),
        "--secret-file",
        secret[1],
        *ports.split(),
    ]
    done = subprocess.run([*command, QUESTION], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_openai_client(up: Up) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples/openai_client.py"),
        "--base-url",
        f"{up.url}/v1",
        QUESTION,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Paris") >= 2


def test_chat_in_the_terminal(up: Up) -> None:
    command = [
        sys.executable,
        "-m",
        "catenary_apps.cli.main",
        "chat",
        "--base-url",
        up.url,
        "--temperature",
        "0",
    ]
    done = subprocess.run(
        [*command, "--max-tokens", "24"],
        input=f"{QUESTION}\n/quit\n",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_profile_of_the_engine_while_it_answers(up: Up, tmp_path: Path) -> None:
    secret = re.search(r"secret in (\S+)", "\n".join(up.lines))
    assert secret is not None
    command = [
        sys.executable,
        "-m",
        "catenary_apps.cli.main",
        "profile",
        "--steps",
        "5",
        "--output",
        "trace.json",
    ]
    # Where this `catenary up` is the only one; the developer's own may run as well.
    environment = os.environ | {"TMPDIR": str(Path(secret[1]).parents[1])}
    with subprocess.Popen(
        [*command, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    ) as profile:
        while profile.poll() is None:
            assert up.ask().status_code == 200
        out, _ = profile.communicate()
    assert profile.returncode == 0
    summary = json.loads(out)
    assert summary["steps"] == 5
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["steps"] == summary["steps"]


def test_killed_engine_is_started_again_and_serves(up: Up) -> None:
    engine = up.service("services.engine")
    assert engine is not None
    below = descendants(engine)
    os.kill(engine, signal.SIGKILL)
    up.line_with(r"engine-0 was ended by SIGKILL; starting it again in", 10)
    wait_for(lambda: up.service("services.engine") not in (None, engine), 20)

    def answered() -> bool:
        response = up.ask()
        # While no engine serves, a request is refused, never answered with a 500.
        assert response.status_code in (200, 503), response.text
        return response.status_code == 200

    wait_for(answered, START_S)
    assert "Paris" in up.ask().json()["choices"][0]["message"]["content"]
    assert not below.keys() & processes().keys()


def test_scaled_out_with_keys_a_template_and_https(tmp_path: Path) -> None:
    make_authority(tmp_path, "authority")
    server = make_certificate(tmp_path, "server", "authority")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    port = two_free_ports()
    options = f"--port {port} --engines 2 --gateways 2 --tokenizers 2 --api-key k-one,k-two"
    options += f" --chat-template {template} --ssl-certfile {server.cert} --ssl-keyfile {server.key}"
    options += " --cors-allow-origins https://a.test --engine-roles prefill,decode"
    options += f" --routers 2 --router-port {two_free_ports()}"
    # The engines are scripted ones, with a pace: what is asked here is not their business.
    script = tmp_path / "script.json"
    script.write_text('{"step_delay_ms": 20}')
    up = Up(tmp_path, *options.split(), CATENARY_ENGINE_SCRIPT=str(script))
    message = {"role": "user", "content": "Hello"}
    body = {"model": MODEL, "messages": [message], "max_tokens": 2}
    trusted = ssl.create_default_context(cafile=server.ca)

    def ask(gateway: int, key: str) -> httpx2.Response:
        url = f"https://127.0.0.1:{port + gateway}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}", "Origin": "https://a.test"}
        return httpx2.post(url, json=body, headers=headers, verify=trusted, timeout=30)

    try:
        ready = up.line_with("ready in", START_S)
        assert f"https://127.0.0.1:{port}/v1" in ready
        assert "k-one" not in "".join(up.lines)
        family = descendants(up.process.pid)
        assert not any("k-one" in command for command in family.values())
        holders = [pid for pid in family if b"k-one" in Path(f"/proc/{pid}/environ").read_bytes()]
        assert holders
        assert all(" gateway " in family[pid] for pid in holders)
        assert {f"gateway-{i}: https://127.0.0.1:{port + i}/v1" for i in (0, 1)} <= set(up.lines)
        for gateway, key in ((0, "k-one"), (0, "k-two"), (1, "k-one"), (1, "k-two")):
            answer = ask(gateway, key)
            assert answer.status_code == 200, answer.text
            # The template shows the message and nothing else; the model's own adds roles and a system text.
            assert answer.json()["usage"]["prompt_tokens"] == 1
            assert answer.headers["access-control-allow-origin"] == "https://a.test"
            assert ask(gateway, "k-three").status_code == 401
        engines = [
            command
            for command in descendants(up.process.pid).values()
            if "catenary_testing.engine" in command
        ]
        assert sorted(command.split("--role ")[1].split()[0] for command in engines) == ["decode", "prefill"]
        for module in ("services.tokenizer", "services.router"):
            victim = up.service(module)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
        assert [ask(gateway, "k-one").status_code for gateway in (0, 1, 0, 1)] == [200] * 4
        family = descendants(up.process.pid)
        _sigterm_lets_an_answer_end(up, f"https://127.0.0.1:{port}/v1/chat/completions", trusted)
        wait_for(lambda: not family.keys() & processes().keys(), 10)
        assert up.lines[-1] == "stopped"
        assert not list(tmp_path.glob("catenary-*"))
    finally:
        up.close()


def _sigterm_lets_an_answer_end(up: Up, url: str, trusted: ssl.SSLContext) -> None:
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "stream": True, "max_tokens": 60}
    body |= {"model": MODEL, "ignore_eos": True}
    headers = {"Authorization": "Bearer k-one"}
    with httpx2.stream("POST", url, json=body, headers=headers, verify=trusted, timeout=60) as response:
        events = (line for line in response.iter_lines() if line.startswith("data:"))
        next(events)
        next(events)
        up.process.send_signal(signal.SIGTERM)
        rest = list(events)
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert up.process.wait(STOP_S) == 0


def test_killed_supervisor_leaves_nothing(up: Up) -> None:
    family = descendants(up.process.pid)
    assert len(family) >= 5
    up.process.kill()
    up.process.wait(10)
    wait_for(lambda: not family.keys() & processes().keys(), 20)
    (left,) = up.scratch.glob("catenary-*")
    # The next one takes away what this one could not.
    after = Up(up.scratch, CATENARY_ENGINE_SCRIPT="default")
    try:
        wait_for(lambda: not left.exists() and len(list(up.scratch.glob("catenary-*"))) == 1, START_S)
    finally:
        after.close()
