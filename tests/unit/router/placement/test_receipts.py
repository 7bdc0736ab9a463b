"""Route receipts: what they say, how many are kept, how they are found."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry

from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet import Fleet
from services.router.metrics import PlacementMetrics
from services.router.placement import LeastLoaded, PlacementRequest, Placer, ReceiptBook

MODEL = common_pb2.ModelInfo(name="m", max_model_len=100)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet(lease_s=5)
    for number in range(count):
        hello = engine_pb2.EngineHello(
            instance_id=f"i{number}",
            engine_name=f"engine {number}",
            model=MODEL,
            capacity=engine_pb2.Capacity(block_size=4, total_blocks=100, max_running=100),
            state=engine_pb2.ENGINE_STATE_SERVING,
        )
        fleet.attach(hello, now=0, unix_time=0)
    return fleet


def placer_of(fleet: Fleet, book: ReceiptBook) -> Placer:
    times = iter(range(1000))
    return Placer(
        fleet,
        LeastLoaded(random.Random(0)),
        retry_after_ms=1,
        receipts=book,
        clock=lambda: next(times) / 1000,
        wall_clock=lambda: 12.5,
    )


def request(name: str) -> PlacementRequest:
    return PlacementRequest(name, "m", range(10), 10, queued_ms=7)


def test_a_receipt_says_what_was_known_best_first():
    fleet = fleet_of(20)
    for number, engine in enumerate(fleet):
        engine.apply(
            engine_pb2.LoadReport(
                sequence=1,
                state=engine_pb2.ENGINE_STATE_SERVING,
                running=20 - number,
                used_blocks=3,
                pending_prefill_tokens=5,
            )
        )
    book = ReceiptBook(4)
    placed = placer_of(fleet, book).place(request("r"))
    (receipt,) = book.find("r", 9)
    assert receipt is placed.receipt
    message = receipt.message()
    assert message.request_id == "r"
    assert message.policy == message.reason == "least_loaded"
    assert message.time_ms == 12_500
    assert message.decision_us == 1000
    assert (message.prompt_tokens, message.queued_ms, message.placement) == (10, 7, 1)
    assert message.considered == 20
    assert len(message.candidates) == 16
    scores = [candidate.score for candidate in message.candidates]
    assert scores == sorted(scores)
    best = message.candidates[0]
    assert (best.instance_id, best.engine_name, best.sequences) == ("i19", "engine 19", 1)
    assert (best.used_blocks, best.total_blocks, best.queued_prefill_tokens) == (3, 100, 5)
    assert (message.chosen, message.lease_epoch) == ("i19", placed.engine.epoch)


def test_the_engine_with_the_same_prompt_is_listed_without_a_score():
    fleet = fleet_of(2)
    book = ReceiptBook(4)
    placer = placer_of(fleet, book)
    asked = request("r")
    asked.prompt_engine = list(fleet)[1]
    receipt = placer.place(asked).receipt.message()
    assert receipt.reason == "same_prompt"
    assert [candidate.instance_id for candidate in receipt.candidates] == ["i1"]
    assert not receipt.candidates[0].HasField("score")


def test_placements_are_counted_for_each_request_and_the_latest_are_kept():
    book = ReceiptBook(4)
    placer = placer_of(fleet_of(2), book)
    first = request("first")
    placer.place(first)
    placer.place(first, excluding=[placer.place(request("second")).engine])
    assert [receipt.placement for receipt in book.find("first", 9)] == [2, 1]
    for number in range(3):
        placer.place(request(str(number)))
    assert len(book) == 4
    assert [receipt.request_id for receipt in book.find(None, 9)] == ["2", "1", "0", "first"]
    assert [receipt.request_id for receipt in book.find(None, 2)] == ["2", "1"]
    assert book.find("second", 9) == []


def test_metrics_add_up_all_receipts_also_those_that_are_gone():
    book, registry = ReceiptBook(2), CollectorRegistry()
    PlacementMetrics(registry).watch(book)
    placer = placer_of(fleet_of(2), book)
    for number in range(5):
        placer.place(request(str(number)))
    labels = {"policy": "least_loaded", "reason": "least_loaded"}
    assert registry.get_sample_value("catenary_router_placements_total", labels) == 5
    assert registry.get_sample_value("catenary_router_placed_prompt_tokens_total") == 50
    assert registry.get_sample_value("catenary_router_matched_prompt_tokens_total") == 0


def test_a_quarantined_request_goes_to_an_engine_without_work_or_nowhere():
    fleet = fleet_of(2)
    busy, idle = fleet
    busy.placed_sequences = 1
    placer = placer_of(fleet, ReceiptBook(1))
    asked = request("r")
    asked.quarantined = True
    assert placer.place(asked).engine is idle
