"""Prefills and decodes do not starve one another, nor do long prompts and short ones."""

from __future__ import annotations

from tests.support.scheduling import (
    chunk_keys,
    decode_keys,
    make_plan,
    make_scheduler,
    make_sequence,
    make_step,
)


def test_a_decode_is_in_every_step_whatever_is_prefilled() -> None:
    engine, _ = make_scheduler(blocks=128, model_len=128, prefills=3, seqs=8)
    engine.add(make_sequence(1, 3, max_tokens=60))
    make_step(engine)
    for key in range(2, 6):
        engine.add(make_sequence(key, 100))
    for _ in range(30):
        plan = make_step(engine)
        assert 1 in decode_keys(plan)
        assert plan.prefills


def test_long_prompts_take_turns() -> None:
    engine, _ = make_scheduler(blocks=128, model_len=128)
    for key in (1, 2, 3):
        engine.add(make_sequence(key, 48, first_token=100 * key))
    # To start is one turn among those of the started.
    assert [chunk_keys(make_step(engine))[0] for _ in range(9)] == [1, 2, 1, 3, 2, 1, 3, 2, 3]


def test_short_prompts_get_ahead_of_a_long_one_and_do_not_starve_it() -> None:
    engine, _ = make_scheduler(blocks=128, model_len=128, seqs=4)
    engine.add(make_sequence(0, 112))
    served = list[int]()
    for key in range(1, 14):
        engine.add(make_sequence(key, 4, max_tokens=1))
        served += chunk_keys(make_step(engine))
    # One short prompt between any two chunks of the long one, though ever more of them wait.
    assert served == [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]


def test_short_prompts_share_their_turn() -> None:
    engine, _ = make_scheduler(blocks=128, model_len=128, seqs=8, prefills=4)
    engine.add(make_sequence(0, 112))
    make_step(engine)
    for key in range(1, 7):
        engine.add(make_sequence(key, 4, max_tokens=1))
    assert [chunk_keys(make_step(engine)) for _ in range(4)] == [[1, 2, 3, 4], [0], [5, 6], [0]]


def test_a_more_urgent_prompt_gets_its_chunks_first_until_the_other_has_aged() -> None:
    engine, _ = make_scheduler(blocks=128, model_len=128, ageing=3)
    engine.add(make_sequence(1, 80, priority=1))
    engine.add(make_sequence(2, 112))
    assert [chunk_keys(make_step(engine))[0] for _ in range(8)] == [2, 2, 2, 2, 1, 2, 2, 2]


def test_a_step_keeps_to_the_token_budget_and_the_prefill_cap() -> None:
    engine, _ = make_scheduler(blocks=128, seqs=8, prefills=2)
    for key in range(6):
        engine.add(make_sequence(key, 11))
    while engine.has_work:
        plan = make_plan(engine)
        assert plan.num_tokens <= 16
        assert len(plan.prefills) <= 2
        engine.commit(plan, {sequence.key: 1 for sequence in plan.sampling()})
