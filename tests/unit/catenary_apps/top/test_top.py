from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from catenary.v1 import common_pb2, engine_pb2, router_pb2
from catenary_apps.cli.fleet import fleet_document
from catenary_apps.cli.main import main
from catenary_apps.cli.routers import RouterView
from catenary_apps.top.frame import Frame, Progress, Rates, make_frame
from catenary_apps.top.table import bar, draw, engine_cells, number, router_lines, seconds, total_line


def engine(
    name: str, *, age_ms: int = 0, placed: int = 0, breaker: Any = 1, **load: Any
) -> router_pb2.FleetEngine:
    state = load.setdefault("state", engine_pb2.ENGINE_STATE_SERVING)
    return router_pb2.FleetEngine(
        state=state,
        instance_id=f"id-of-{name}",
        engine_name=name,
        model=common_pb2.ModelInfo(name="m"),
        load=engine_pb2.LoadReport(**load),
        placed_sequences=placed,
        report_age_ms=age_ms,
        breaker=breaker,
        role=engine_pb2.ENGINE_ROLE_PREFILL,
    )


def view(address: str, *engines: Any, at: float = 100.0, **fields: Any) -> RouterView:
    return RouterView(address, router_pb2.GetFleetResponse(engines=engines, **fields), None, at)


AWAY = RouterView("gone:7070", None, "The service cannot be reached.", 100.0)


def test_a_rate_is_the_difference_of_two_reports_and_stays_until_the_next() -> None:
    rates = Rates()
    assert rates.update({"e": Progress(10.0, 1000)}) == {"e": None}
    assert rates.update({"e": Progress(11.0, 1500)}) == {"e": 500.0}
    # The same report, asked for again: its time is known to some milliseconds only.
    assert rates.update({"e": Progress(11.004, 1500)}) == {"e": 500.0}
    assert rates.update({"e": Progress(12.0, 1500)}) == {"e": 250.0}
    assert rates.update({}) == {}
    assert rates.update({"e": Progress(13.0, 1500)}) == {"e": None}


def test_a_counter_that_begins_anew_gives_no_rate_at_first() -> None:
    rates = Rates()
    rates.update({"e": Progress(10.0, 1000)})
    assert rates.update({"e": Progress(11.0, 20)}) == {"e": None}
    assert rates.update({"e": Progress(12.0, 30)}) == {"e": 10.0}


@given(st.lists(st.tuples(st.floats(-10, 1000), st.integers(0, 2**63)), max_size=40))
def test_no_report_makes_a_rate_negative(reports: list[tuple[float, int]]) -> None:
    rates = Rates()
    for at, tokens in reports:
        rate = rates.update({"e": Progress(at, tokens)})["e"]
        assert rate is None or rate >= 0


def test_an_engine_of_two_routers_is_one_row_with_the_newest_report() -> None:
    old = engine("e", age_ms=900, placed=3, running=1, breaker=router_pb2.BREAKER_STATE_OPEN)
    new = engine("e", age_ms=100, placed=4, running=2)
    lanes = [router_pb2.Lane(queued_sequences=2, oldest_wait_ms=1500, refused=1)]
    frame = make_frame([view("a:1", old, lanes=lanes), AWAY, view("b:1", new, lanes=lanes)], Rates())
    (row,) = frame.engines
    assert (row.running, row.placed, row.breaker, row.report_age_s) == (2, 7, "open", 0.1)
    (lane,) = frame.lanes
    assert (lane.priority_class, lane.queued, lane.oldest_wait_s, lane.refused) == ("default", 4, 1.5, 2)
    assert not frame.complete
    assert router_lines(frame)[1] == ("router gone:7070: away: The service cannot be reached.", True)


def test_what_any_router_sees_of_an_engine_counts_and_not_what_it_says() -> None:
    first, second = engine("e", age_ms=900), engine("e", age_ms=100)
    first.state = engine_pb2.ENGINE_STATE_STALLED
    frame = make_frame([view("a:1", first), view("b:1", second)], Rates())
    assert [row.state for row in frame.engines] == ["stalled"]
    assert total_line(frame).startswith("0 of 1 engines serve")
    said = fleet_document([view("a:1", first)])["engines"][0]
    assert (said["state"], said["load"]["state"]) == ("stalled", "serving")


def test_totals_and_rates_of_frames() -> None:
    rates = Rates()
    for at, tokens in ((100.0, 0), (102.0, 3000)):
        one = engine("a", generated_tokens=tokens, used_blocks=5, total_blocks=10, running=3)
        two = engine("b", generated_tokens=tokens, total_blocks=10, prompt_tokens=80, cached_prompt_tokens=20)
        frame = make_frame([view("r:1", one, two, at=at)], rates)
    assert total_line(frame) == (
        "2 of 2 engines serve, 3 running, 0 waiting, 0 queued, KV 25%, 3.0k tok/s, prefix hits 25%"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (999.7, "1.0k"),
        (15_400, "15.4k"),
        (2.5e6, "2.5M"),
        (3e14, "300T"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_bars_and_spans() -> None:
    assert bar(0.5, ascii_only=True) == "#####.....  50%"
    assert bar(None, ascii_only=True) == "-"
    assert [seconds(value) for value in (0.25, 600, 7200)] == ["0.2s", "10m", "2h"]


def busy_frame(count: int) -> Frame:
    engines = [engine(f"engine-number-{place}", used_blocks=9, total_blocks=3) for place in range(count)]
    engines.append(engine("\x1b[31mred[/]\x07", state=engine_pb2.ENGINE_STATE_DRAINING))
    classes = common_pb2.PriorityClass.values()[1:5]
    lanes = [router_pb2.Lane(priority_class=number) for number in classes]
    return make_frame([view("r:1", *engines, lanes=lanes), AWAY], Rates())


def drawn(frame: Frame, width: int, height: int | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(draw(frame, console, height=height))
    return out.getvalue()


@pytest.mark.parametrize("width", [1, 5, 20, 40, 80, 200])
def test_a_frame_fits_any_width_and_has_no_escape_codes(width: int) -> None:
    text = drawn(busy_frame(3), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "\x07" not in text


def test_names_stay_where_other_columns_go() -> None:
    frame = busy_frame(1)
    assert engine_cells(frame, 200, ascii_only=True).header[-1] == "age"
    assert engine_cells(frame, 40, ascii_only=True).header == ("engine", "state", "run", "tok/s")
    assert engine_cells(frame, 12, ascii_only=True).header == ("engine",)
    assert "?[31mred[/]?" in drawn(frame, 200)


def test_a_low_terminal_shows_first_what_asks_for_attention() -> None:
    text = drawn(busy_frame(50), 100, height=20)
    assert len(text.splitlines()) <= 20
    assert "draining" in text
    assert "and 43 more" in text


def test_the_document_has_every_key_and_words_for_enums() -> None:
    lanes = [router_pb2.Lane(priority_class=common_pb2.PRIORITY_CLASS_BULK, queued_sequences=2)]
    document = fleet_document([view("r:1", engine("e", generated_tokens=2**60), lanes=lanes), AWAY])
    assert json.loads(json.dumps(document)) == document
    (one,) = document["engines"]
    assert (one["router"], one["role"], one["breaker"]) == ("r:1", "prefill", "closed")
    assert (one["load"]["state"], one["load"]["generated_tokens"]) == ("serving", 2**60)
    assert one["model"]["tasks"] == []
    assert one["load"]["preemptions"] == 0
    (lane,) = document["lanes"]
    assert (lane["router"], lane["priority_class"], lane["queued_sequences"]) == ("r:1", "bulk", 2)
    there, gone = document["routers"]
    assert there.keys() == gone.keys()
    assert (there["error"], there["draining"], gone["draining"]) == (None, False, None)
    assert gone["error"] == "The service cannot be reached."


def test_what_is_unspecified_or_of_a_later_revision_has_a_word() -> None:
    unknown: Any = 17
    odd = router_pb2.FleetEngine(breaker=unknown)
    (one,) = fleet_document([view("r:1", odd)])["engines"]
    assert (one["role"], one["breaker"], one["load"]["state"]) == ("both", "unknown", "unspecified")
    (row,) = make_frame([view("r:1", odd)], Rates()).engines
    assert row.breaker == "unknown"


@pytest.mark.parametrize("command", ["top", "fleet"])
def test_a_wrong_router_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--router", "a:1,nonsense"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--router nonsense" in captured.err
    assert captured.err.count("\n") == 1
