"""`catenary fleet` and `catenary top` on a router with scripted engines."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from asyncio.subprocess import PIPE
from typing import Any

from catenary_apps.cli.main import main
from tests.support.specs import sequence_spec
from tests.support.waiting import eventually


async def run(fleet, *words: str, also: str = "") -> int:
    where = f"--router={fleet.router_address}{also}"
    return await asyncio.to_thread(main, [*words, where, f"--client-secret-file={fleet.secrets.client_file}"])


def document_in(out: str) -> dict[str, Any]:
    # The router of this process logs to the same stream.
    document: dict[str, Any] = json.loads(out[out.index("{\n") : out.rindex("\n}") + 2])
    return document


async def test_the_fleet_as_json_and_as_one_frame(start_fleet, capsys):
    fleet = await start_fleet(engines=2)
    await asyncio.gather(*(fleet.answer(sequence_spec([5, n], max_tokens=8)) for n in range(4)))

    await eventually(
        lambda: sum(one.report.generated_tokens for one in fleet.router.fleet if one.report) == 32,
        "the reports",
    )
    assert await run(fleet, "fleet") == 0
    document = document_in(capsys.readouterr().out)
    assert list(document) == ["routers", "engines", "lanes"]
    (router,) = document["routers"]
    assert router["address"] == fleet.router_address
    assert router["error"] is None
    assert sorted(engine["engine_name"] for engine in document["engines"]) == ["engine-0", "engine-1"]
    assert sum(engine["load"]["generated_tokens"] for engine in document["engines"]) == 32
    assert {engine["load"]["state"] for engine in document["engines"]} == {"serving"}
    classes = {lane["priority_class"] for lane in document["lanes"]}
    assert classes == {"system", "interactive", "default", "bulk"}
    assert sum(lane["admitted"] for lane in document["lanes"]) == 4

    assert await run(fleet, "top", "--once") == 0
    text = capsys.readouterr().out
    assert "2 of 2 engines serve" in text
    assert "engine-1" in text
    assert "interactive" in text
    assert "\x1b" not in text


async def test_a_router_that_is_away_is_shown_as_such(start_fleet, capsys, tmp_path):
    fleet = await start_fleet(engines=1)
    gone = f",unix:{tmp_path}/gone.sock"
    assert await run(fleet, "top", "--once", also=gone) == 1
    text = capsys.readouterr().out
    assert "gone.sock: away:" in text
    assert "1 of 1 engines serve" in text
    assert await run(fleet, "fleet", also=gone) == 1
    captured = capsys.readouterr()
    assert [router["error"] is None for router in document_in(captured.out)["routers"]] == [True, False]
    assert "Traceback" not in captured.err


def command(fleet, address: str, *flags: str) -> list[str]:
    secret = f"--client-secret-file={fleet.secrets.client_file}"
    return [sys.executable, "-m", "catenary_apps.cli.main", "top", f"--router={address}", secret, *flags]


async def test_frames_go_on_while_a_router_is_away_and_when_it_is_back(start_fleet):
    fleet = await start_fleet(engines=1)
    proxy = await fleet.add_proxy()
    top = await asyncio.create_subprocess_exec(
        *command(fleet, proxy.address, "--interval=0.1", "--timeout=0.5"), stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(30):
        await shown(top.stdout, b"1 of 1 engines serve")
        proxy.freeze()
        await shown(top.stdout, b"away:")
        proxy.thaw()
        await shown(top.stdout, b"1 of 1 engines serve")
        top.send_signal(signal.SIGINT)
        out, err = await top.communicate()
    assert (top.returncode, err) == (0, b"")
    assert b"\x1b" not in out


async def shown(stream, text: bytes) -> None:
    while text not in (line := await stream.readline()):
        assert line, "the view ended"


async def test_q_ends_the_live_view_and_the_terminal_is_as_it_was(start_fleet):
    fleet = await start_fleet(engines=1)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    termios.tcsetwinsize(theirs, (24, 100))
    loop, seen = asyncio.get_running_loop(), bytearray()
    loop.add_reader(ours, lambda: seen.extend(os.read(ours, 65536)))
    try:
        top = await asyncio.create_subprocess_exec(
            *command(fleet, fleet.router_address, "--interval=600"),
            stdin=theirs,
            stdout=theirs,
            stderr=PIPE,
            env=os.environ | {"TERM": "xterm"},
        )
        await eventually(lambda: b"engine-0" in seen, "the first frame", timeout_s=30)
        os.write(ours, b"q")
        async with asyncio.timeout(30):
            _, err = await top.communicate()
        assert (top.returncode, err) == (0, b"")
        assert termios.tcgetattr(theirs) == before
        # The alternate screen is left.
        await eventually(lambda: b"\x1b[?1049l" in seen, "the normal screen")
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        os.close(theirs)
