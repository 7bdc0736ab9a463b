"""What gateways are told to refuse themselves, and what they make of it."""

from __future__ import annotations

from catenary.v1 import common_pb2, router_pb2
from gateway.link.router_session import Shed
from services.router.admission import AdmissionQueues, QueueOptions, Shedding
from services.router.admission.queues import MAX_ENTRIES

DEFAULT = common_pb2.PRIORITY_CLASS_DEFAULT
BULK = common_pb2.PRIORITY_CLASS_BULK


def room_of(**options):
    return AdmissionQueues(QueueOptions(**options), lambda entry: entry.tokens)


def add(room, count, model="m", **fields):
    spec = common_pb2.SequenceSpec(model=model, token_ids=[1], **fields)
    entries = [room.entry(n, spec, 0.0, first=False, apart=False) for n in range(count)]
    for entry in entries:
        room.add(entry, 0.0)
    return entries


def keys(state):
    return {
        (entry.model, entry.priority_class, entry.tenant if entry.HasField("tenant") else None)
        for entry in state.entries
    }


def test_a_full_class_and_a_full_tenant_are_told_once_and_taken_back_late():
    room = room_of(sequences=(10,) * 4, tenant_share=0.4)
    shedding = Shedding()
    assert shedding.update(room, 0.0) is None
    rows = add(room, 4, tenant="a")
    state = shedding.update(room, 0.0)
    assert keys(state) == {("m", DEFAULT, "a")}
    assert state.entries[0].code == common_pb2.ERROR_CODE_OVERLOADED
    assert shedding.update(room, 0.1) is None
    rows += add(room, 6, tenant="b")
    assert keys(shedding.update(room, 0.2)) == {("m", DEFAULT, name) for name in ("a", "b", None)}
    room.remove(rows.pop())
    # Nine of ten still count as full: it would else change with each that leaves.
    assert shedding.update(room, 0.3) is None
    room.remove(rows.pop())
    assert keys(shedding.update(room, 0.4)) == {("m", DEFAULT, "a"), ("m", DEFAULT, "b")}
    for entry in rows:
        room.remove(entry)
    assert keys(shedding.update(room, 0.5)) == set()
    assert shedding.update(room, 0.6) is None


def test_what_goes_on_is_told_again_before_it_lapses():
    room = room_of(sequences=(1,) * 4, retry_after_ms=1000, max_retry_after_ms=1000)
    shedding = Shedding()
    add(room, 1)
    assert shedding.update(room, 0.0).entries[0].retry_after_ms == 1000
    assert shedding.update(room, 0.4) is None
    assert shedding.update(room, 0.6).entries


def test_entries_are_bounded():
    room = room_of(sequences=(1000,) * 4, tenant_share=0.001)
    for number in range(100):
        add(room, 1, tenant=f"t{number}")
    assert len(Shedding().update(room, 0.0).entries) == MAX_ENTRIES


def entry(**fields):
    values = {"code": common_pb2.ERROR_CODE_OVERLOADED, "retry_after_ms": 2000, **fields}
    return router_pb2.ShedEntry(**values)


def test_a_gateway_heeds_what_it_was_told_until_it_lapses():
    now = [100.0]
    shed = Shed(lambda: now[0])
    assert shed.refusal("m", DEFAULT, "a") is None
    shed.update(
        router_pb2.ShedState(
            entries=[
                entry(model="m", priority_class=DEFAULT, tenant="a"),
                entry(model="n", priority_class=BULK),
                entry(model="n", priority_class=DEFAULT, retry_after_ms=500),
            ]
        )
    )
    refused = shed.refusal("m", DEFAULT, "a")
    assert (refused.code, refused.retry_after_ms) == (common_pb2.ERROR_CODE_OVERLOADED, 2000)
    # UNSPECIFIED is DEFAULT.
    assert shed.refusal("m", common_pb2.PRIORITY_CLASS_UNSPECIFIED, "a") is not None
    assert shed.refusal("m", DEFAULT, "b") is None
    assert shed.refusal("m", BULK, "a") is None
    assert shed.refusal("n", BULK, "whoever") is not None
    assert shed.refusal("n", DEFAULT, "") is not None
    now[0] = 101.5
    assert shed.refusal("m", DEFAULT, "a").retry_after_ms == 500
    assert shed.refusal("n", DEFAULT, "") is None
    now[0] = 102.0
    assert shed.refusal("m", DEFAULT, "a") is None
    shed.update(router_pb2.ShedState(entries=[entry(model="m", priority_class=BULK)]))
    assert shed.refusal("m", BULK, "") is not None
    shed.update(router_pb2.ShedState())
    assert shed.refusal("m", BULK, "") is None
