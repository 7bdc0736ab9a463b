"""An engine that is told to drain: it finishes for all routers, leaves, and its process ends with 0."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2, router_pb2
from catenary_apps.cli.main import main
from catenary_testing.engine import Script
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]
SLOW = Script(step_delay_ms=5)


async def drain(fleet, engine: str, deadline_ms: int | None = None) -> list[str]:
    answer = await fleet.stub.Drain(router_pb2.DrainRequest(engine=engine, deadline_ms=deadline_ms))
    return list(answer.draining)


async def rest_of(call) -> tuple[list[int], common_pb2.SequenceEnd]:
    tokens: list[int] = []
    end = common_pb2.SequenceEnd()
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens.extend(message.token_ids)
        if message.HasField("end"):
            end = message.end
    return tokens, end


async def test_a_drained_engine_finishes_leaves_and_ends_with_0(start_fleet):
    fleet = await start_fleet(engines=0)
    process = fleet.add_process(script=SLOW, flags=("--engine-name", "old"))
    await fleet.serving(1)
    calls = [fleet.generate(sequence_spec([9, index], max_tokens=150)) for index in range(3, 7)]
    begun = [list((await call.read()).token_ids) for call in calls]
    await fleet.add_engine(script=SLOW)
    await fleet.serving(2)

    (instance,) = await drain(fleet, "old", deadline_ms=30_000)
    (old,) = [one for one in (await fleet.view()).engines if one.instance_id == instance]
    assert old.placed_sequences == 4
    # At once, not with the engine's next report: nothing new goes there.
    answers = await asyncio.gather(*(fleet.answer(sequence_spec([7, n], max_tokens=8)) for n in range(3, 11)))
    for number, (tokens, _) in enumerate(answers):
        assert tokens == expected_tokens([7, number + 3], 8)
    assert fleet.engines[0].app.frontend.load().generated_tokens >= 64
    for index, (call, first) in enumerate(zip(calls, begun, strict=True)):
        tokens, end = await rest_of(call)
        assert first + tokens == expected_tokens([9, index + 3], 150)
        assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert await process.wait() == 0
    await eventually(lambda: len(fleet.router.fleet) == 1, "the old engine to leave")
    assert "Traceback" not in process.log.read_text()
    await fleet.idle()


async def test_what_does_not_end_by_the_deadline_ends_with_a_retryable_error(start_fleet):
    fleet = await start_fleet(engines=0, router={"failover_wait_s": 0})
    process = fleet.add_process(script=SLOW, flags=("--engine-name", "old"))
    await fleet.serving(1)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=4000))
    await call.read()
    await drain(fleet, "old", deadline_ms=60_000)
    # Once more, as an operator does who does not want to wait.
    await drain(fleet, "old", deadline_ms=100)
    _, end = await rest_of(call)
    assert (end.error.code, end.error.retryable) == (common_pb2.ERROR_CODE_DRAINING, True)
    assert await process.wait() == 0
    await fleet.idle()


async def test_sigterm_shortens_a_long_drain_to_the_engines_own_time(start_fleet):
    fleet = await start_fleet(engines=0, router={"failover_wait_s": 0})
    process = fleet.add_process(script=SLOW, flags=("--engine-name", "old", "--drain-s", "0.1"))
    await fleet.serving(1)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=4000))
    await call.read()
    await drain(fleet, "old", deadline_ms=600_000)
    await fleet.serving(0)
    process.signal(signal.SIGTERM)
    _, end = await rest_of(call)
    assert end.error.code == common_pb2.ERROR_CODE_DRAINING
    assert await process.wait() == 0


async def test_a_drain_is_for_all_routers(start_fleet):
    first, second = await start_fleet(engines=0), await start_fleet(engines=0)
    process = first.add_process(script=SLOW, flags=("--engine-name", "old"), also=(second.router_address,))
    await first.serving(1)
    await second.serving(1)
    call = second.generate(sequence_spec(PROMPT, max_tokens=100))
    begun = list((await call.read()).token_ids)
    await drain(first, "old")
    await second.serving(0)
    tokens, end = await rest_of(call)
    assert begun + tokens == expected_tokens(PROMPT, 100)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert await process.wait() == 0


async def test_an_engine_that_is_not_there_is_not_found(start_fleet):
    fleet = await start_fleet(engines=0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(fleet, "nobody")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert error_of(caught.value).param == "engine"


async def test_catenary_drain_waits_until_the_engine_has_left(start_fleet, capsys, monkeypatch):
    fleet = await start_fleet(engines=0)
    process = fleet.add_process(script=SLOW, flags=("--engine-name", "old"))
    await fleet.serving(1)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=100))
    await call.read()
    where = ["--router", fleet.router_address, f"--client-secret-file={fleet.secrets.client_file}"]
    code = await asyncio.to_thread(main, ["drain", "old", *where, "--deadline", "30"])
    assert code == 0
    assert "old has left" in capsys.readouterr().out
    assert await process.wait() == 0
    _, end = await rest_of(call)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert await asyncio.to_thread(main, ["drain", "old", *where]) == 1
    assert "No engine of this instance id or name" in capsys.readouterr().err


def test_a_bad_command_line_of_catenary_drain_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["drain", "e", "--router", "nonsense"]) == 2
    assert "--router nonsense" in capsys.readouterr().err
