"""Membership, leases, reports and the models served."""

from __future__ import annotations

from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet import Engine, Fleet
from services.router.fleet.registry import MAX_DEPARTED_MODELS


def hello(instance: str = "i1", *, model: str = "m", **fields) -> engine_pb2.EngineHello:
    info = {"name": model, "max_model_len": 100, "vocab_size": 10, **fields.pop("info", {})}
    return engine_pb2.EngineHello(
        instance_id=instance,
        engine_name=instance,
        model=common_pb2.ModelInfo(**info),
        capacity=engine_pb2.Capacity(block_size=16, total_blocks=64, max_running=4, max_waiting=2),
        state=fields.pop("state", engine_pb2.ENGINE_STATE_SERVING),
    )


def attach(fleet: Fleet, *args, **kwargs) -> Engine:
    return fleet.attach(hello(*args, **kwargs), now=0.0, unix_time=1000.9)[0]


def report(sequence: int, **fields) -> engine_pb2.LoadReport:
    return engine_pb2.LoadReport(sequence=sequence, state=engine_pb2.ENGINE_STATE_SERVING, **fields)


def test_epochs_rise_and_an_instance_replaces_itself():
    fleet = Fleet(lease_s=5)
    first = attach(fleet, "a")
    second, replaced = fleet.attach(hello("a"), now=1.0, unix_time=1.0)
    assert replaced is first
    assert second.epoch > first.epoch
    assert not fleet.detach(first)
    assert list(fleet) == [second]
    assert fleet.attached("a")
    assert fleet.detach(second)
    assert not fleet.detach(second)


def test_a_lease_runs_out_only_after_silence():
    fleet = Fleet(lease_s=5)
    quiet, loud = attach(fleet, "a"), attach(fleet, "b")
    loud.heard(4.0)
    assert fleet.expired(5.0) == []
    assert fleet.expired(5.1) == [quiet]


def test_candidates_serve_the_model_and_are_not_excluded():
    fleet = Fleet(lease_s=5)
    serving = attach(fleet, "a")
    attach(fleet, "b", state=engine_pb2.ENGINE_STATE_STARTING)
    attach(fleet, "c", model="other")
    assert fleet.candidates("m") == [serving]
    assert fleet.candidates("m", excluding=[serving]) == []
    assert fleet.knows("other")
    assert not fleet.knows("none")


def test_a_report_splits_into_ours_and_others():
    engine = attach(Fleet(lease_s=5))
    engine.placed_sequences, engine.placed_tokens = 2, 40
    assert engine.apply(report(1, running=3, waiting=1, used_blocks=5, pending_prefill_tokens=8))
    assert engine.sequences == 4
    assert engine.tokens == 88
    engine.placed_sequences -= 2
    assert engine.sequences == 2
    assert engine.room >= 1
    engine.placed_sequences += 4
    assert engine.room < 1


def test_a_report_that_goes_back_changes_nothing():
    engine = attach(Fleet(lease_s=5))
    assert engine.apply(report(0, running=1))
    assert engine.apply(report(7, running=2))
    assert not engine.apply(report(7, running=9))
    assert not engine.apply(report(3, running=9))
    assert engine.report.running == 2


def test_a_report_beyond_the_capacity_counts_as_the_capacity():
    fleet = Fleet(lease_s=5)
    engine = attach(fleet)
    most = (1 << 32) - 1
    wild = {"running": most, "waiting": most, "used_blocks": most, "total_blocks": most}
    assert engine.apply(report(1, **wild, pending_prefill_tokens=(1 << 64) - 1, steps=(1 << 64) - 1))
    load = engine.report
    assert (load.running, load.waiting, load.used_blocks, load.total_blocks) == (4, 2, 64, 64)
    assert load.pending_prefill_tokens == 600
    assert engine.sequences == 6
    assert engine.room < 1
    # Those that have places to run but wait for the next step are within the capacity.
    assert engine.apply(report(2, waiting=6))
    assert engine.report.waiting == 6


def test_sums_of_loads_stop_at_the_largest_value():
    fleet = Fleet(lease_s=5)
    most = (1 << 32) - 1
    for name in "ab":
        engine = attach(fleet, name)
        # Larger than any hello that is accepted.
        engine.capacity.max_running = engine.capacity.max_waiting = most
        engine.apply(report(1, running=most, waiting=most, used_blocks=64, total_blocks=64))
    (model,) = fleet.served_models()
    assert (model.load.running, model.load.waiting) == (most, most)
    assert (model.load.used_blocks, model.load.total_blocks) == (128, 128)


def test_models_add_up_their_engines_and_outlive_them():
    fleet = Fleet(lease_s=5)
    first, second = attach(fleet, "a"), attach(fleet, "b", info={"max_model_len": 80})
    first.apply(report(1, running=1, used_blocks=3, total_blocks=64))
    second.apply(report(1, waiting=2, used_blocks=4, total_blocks=64))
    (model,) = fleet.served_models()
    assert (model.serving_engines, model.created, model.info.max_model_len) == (2, 1000, 80)
    assert (model.load.running, model.load.waiting, model.load.used_blocks) == (1, 2, 7)
    assert model.load.total_blocks == 128
    fleet.detach(first)
    fleet.detach(second)
    (model,) = fleet.served_models()
    assert model.serving_engines == 0
    assert model.load.total_blocks == 0
    attach(fleet, "c", info={"max_model_len": 500})
    assert fleet.served_models()[0].info.max_model_len == 500
    assert fleet.served_models()[0].created == 1000


def test_engines_of_one_model_share_a_vocabulary():
    fleet = Fleet(lease_s=5)
    attach(fleet, "a")
    other = common_pb2.ModelInfo(name="m", max_model_len=5, vocab_size=11)
    assert fleet.conflict(other, "b")
    assert fleet.conflict(other, "a") is None
    other.vocab_size = 10
    assert fleet.conflict(other, "b") is None
    other.tokenizer_sha256 = "ff"
    assert fleet.conflict(other, "b")


def test_models_that_nobody_serves_any_more_are_bounded():
    fleet = Fleet(lease_s=5)
    stays = attach(fleet, "stays", model="kept")
    for number in range(2000):
        fleet.detach(attach(fleet, "x", model=f"m{number}"))
    assert len(fleet.served_models()) == 1 + MAX_DEPARTED_MODELS
    assert fleet.knows("kept")
    assert not fleet.knows("m1")
    assert fleet.knows("m1999")
    assert list(fleet) == [stays]


def test_the_model_that_was_left_first_is_forgotten_first():
    fleet = Fleet(lease_s=5)
    fleet.detach(attach(fleet, "x", model="veteran"))
    for number in range(MAX_DEPARTED_MODELS - 1):
        fleet.detach(attach(fleet, "x", model=f"m{number}"))
    fleet.detach(attach(fleet, "x", model="veteran"))
    # Replaced under its own instance id, by an engine of another model.
    attach(fleet, "x", model="last")
    attach(fleet, "x", model="other")
    assert fleet.knows("veteran")
    assert fleet.knows("last")
    assert not fleet.knows("m0")
    assert fleet.knows("m1")


def test_models_that_are_attached_are_all_kept():
    fleet = Fleet(lease_s=5)
    for number in range(1100):
        attach(fleet, f"engine-{number}", model=f"m{number}")
    assert len(fleet.served_models()) == 1100
