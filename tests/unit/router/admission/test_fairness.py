"""Laws of the lanes: turns of tenants, order, promotion, reserved places, deadlines."""

from __future__ import annotations

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.v1 import common_pb2
from services.router.admission import AdmissionQueues, QueuedSequence, QueueOptions, Refused
from services.router.admission.guard import ClassQuota
from services.router.admission.lanes import BULK, DEFAULT, INTERACTIVE, LANES, SYSTEM, FairQueue, Lanes
from services.router.admission.queues import TICK_S, WINDOW_S, Deadlines, DrainRate

QUANTUM = 10


def entry(number, tenant="", cost=1, lane=DEFAULT, **fields):
    values = {"since": 0.0, "deadline": 1e9, "sequences": 1, **fields}
    return QueuedSequence(item=number, model="m", home=lane, tenant=tenant, tokens=cost, **values)


def tokens(one):
    return one.tokens


def served(queue):
    """The rest of a queue in the order in which it is served."""
    found = []
    while (head := queue.head()) is not None:
        queue.take(head)
        found.append(head)
    return found


actions = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "take", "pass", "remove"]),
        st.integers(0, 4),
        st.integers(1, 60),
    ),
    max_size=80,
)


@given(actions)
@settings(max_examples=300, deadline=None)
def test_any_interleaving_keeps_order_within_a_tenant_and_forgets_the_rest(script):
    queue, waiting, number = FairQueue(QUANTUM, tokens), {}, 0
    for what, tenant, cost in script:
        rows = waiting.setdefault(str(tenant), [])
        if what == "add":
            number += 1
            one = entry(number, str(tenant), cost)
            queue.add(one)
            rows.append(one)
        elif what == "take" and (head := queue.head()) is not None:
            queue.take(head)
            assert waiting[head.tenant].pop(0) is head
        elif what == "pass" and rows:
            head = queue.head()
            queue.take(passing := rows.pop(cost % len(rows)))
            assert passing is head or queue.head() is head
        elif what == "remove" and rows:
            queue.remove(rows.pop(cost % len(rows)))
        assert bool(queue) == any(waiting.values())
        queue.check()
        assert {one.tenant for one in queue.firsts()} == {name for name, row in waiting.items() if row}
    for one in served(queue):
        assert waiting[one.tenant].pop(0) is one
    assert not any(waiting.values())
    assert not queue
    queue.check()


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 60),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_flood_delays_another_tenant_by_a_bounded_number_of_quanta(flood, cost, floods, comes_back):
    """Also when each of the flood's entries comes only once the one before it was served."""
    queue, number = FairQueue(QUANTUM, tokens), 0
    for which in range(floods):
        for each in flood[:1] if comes_back else flood:
            queue.add(entry(number, f"flood {which}", each))
            number += 1
    served_before = [queue.head()]
    queue.take(served_before[0])
    if comes_back:
        queue.add(entry(number, served_before[0].tenant, flood[0]))
    mine = entry(-1, "mine", cost)
    queue.add(mine)
    spent = dict.fromkeys((f"flood {which}" for which in range(floods)), 0)
    for turn in range(10_000):
        head = queue.head()
        if head is mine:
            break
        queue.take(head)
        spent[head.tenant] += head.tokens
        if comes_back:
            queue.add(entry(turn, head.tenant, flood[turn % len(flood)]))
    rounds = ceil(cost / QUANTUM) + 1
    assert head is mine
    assert all(each <= rounds * QUANTUM + max(flood) for each in spent.values())


def test_a_sequence_that_overtakes_others_pays_for_it():
    queue = FairQueue(QUANTUM, tokens)
    queue.add(large := entry(0, "large", 50))
    flood = []
    for number in range(1, 60):
        flood.append(entry(number, "flood", 5))
        queue.add(flood[-1])
        queue.add(entry(number, "other", 5))
    assert [one.tenant for one in queue.some(2)] == ["large", "flood", "flood"]
    while (head := queue.head()) is not large:
        queue.take(head)
        if head is flood[0]:
            flood.pop(0)
    for one in flood[1:11]:
        queue.take(one)
    assert queue.head() is large
    queue.take(large)
    spent = {"flood": 0, "other": 0}
    while spent["other"] < 50:
        head = queue.head()
        queue.take(head)
        spent[head.tenant] += head.tokens
    # Ten of them went past.
    assert spent["flood"] <= QUANTUM + 5


def test_tenants_get_the_same_tokens_whatever_their_entries_cost():
    queue = FairQueue(QUANTUM, tokens)
    for number in range(200):
        queue.add(entry(number, "small", 2))
    for number in range(8):
        queue.add(entry(number, "large", 50))
    spent = {"small": 0, "large": 0}
    while spent["small"] < 300:
        head = queue.head()
        queue.take(head)
        spent[head.tenant] += head.tokens
    assert abs(spent["small"] - spent["large"]) <= QUANTUM + 50


def test_ten_thousand_invented_tenants_leave_nothing_behind():
    queue = FairQueue(QUANTUM, tokens)
    for number in range(10_000):
        one = entry(number, f"t{number}", 7)
        queue.add(one)
        if number % 3 == 0:
            queue.remove(one)
        elif number % 100 == 0:
            queue.take(queue.head())
            queue.check()
    served(queue)
    assert not queue
    queue.check()


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 2), st.booleans()), max_size=40))
@settings(max_examples=200, deadline=None)
def test_lanes_are_served_in_order_and_those_in_front_first(entries):
    lanes = Lanes(QUANTUM, tokens, promote_after_s=1e9)
    for number, (lane, tenant, first) in enumerate(entries):
        lanes.add(entry(number, str(tenant), lane=lane, first=first), 0.0)
    order = []
    while len(lanes):
        head = next(lanes.heads())
        lanes.take(head)
        order.append(head)
    assert [one.home for one in order] == sorted(one.home for one in order)
    for lane in LANES:
        mine = [one for one in order if one.home == lane]
        assert [one.first for one in mine] == sorted((one.first for one in mine), reverse=True)
        front = [one.item for one in mine if one.first]
        assert front == sorted(front)


def test_nothing_starves_under_a_flood_of_a_higher_class():
    """One place is served per second; two sequences of the class above come in each."""
    lanes = Lanes(QUANTUM, tokens, promote_after_s=5)
    patient = entry("patient", "slow", lane=BULK)
    lanes.add(patient, 0.0)
    for second in range(100):
        for which in range(2):
            lanes.add(entry((second, which), f"flood {which}", lane=INTERACTIVE), float(second))
        lanes.promote(float(second))
        head = next(lanes.heads())
        lanes.take(head)
        if head is patient:
            break
    assert head is patient
    # Up two classes, then what two tenants get in two rounds.
    assert second <= 5 + 5 + 2 * (2 * QUANTUM + 1)


def test_a_tenant_that_lets_thousands_wait_has_one_at_a_time_in_the_next_lane():
    lanes = Lanes(QUANTUM, tokens, promote_after_s=5)
    rows = [entry(number, "batch", lane=BULK) for number in range(1000)]
    for one in rows:
        lanes.add(one, 0.0)
    assert lanes.promote(10.0) == rows[:1]
    assert lanes.promote(11.0) == []
    assert lanes.head(DEFAULT) is rows[0]
    lanes.take(rows[0])
    assert lanes.promote(12.0) == rows[1:2]
    # It goes on up, but never among probes and operators.
    assert lanes.promote(20.0)[0] is rows[1]
    assert lanes.head(INTERACTIVE) is rows[1]
    lanes.promote(100.0)
    assert lanes.head(SYSTEM) is None
    for one in rows[1:]:
        lanes.remove(one)
    assert not len(lanes)
    # Nothing is left of the tenant's that was moved up: the next one moves at once.
    lanes.add(last := entry("last", "batch", lane=BULK), 100.0)
    assert lanes.promote(105.0) == [last]


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.sampled_from(LANES), st.integers(1, 4), st.booleans()), max_size=120),
)
@settings(max_examples=200, deadline=None)
def test_reserved_places_hold_whatever_comes(total, script):
    shares = (0.1, 0.1, 0.2)
    quota = ClassQuota(shares)
    quota.update(total, 0)
    for lane, sequences, leaves in script:
        placed = quota.load.placed
        if leaves:
            placed[lane] -= min(placed[lane], sequences)
        elif quota.admits(lane, sequences) and sum(placed) + sequences <= total:
            placed[lane] += sequences
            kept = sum(max(0, quota.reserved(each) - placed[each]) for each in range(lane))
            assert total - sum(placed) >= kept
    # And no class is shut out of an empty fleet, however small.
    quota.load.placed[:] = [0, 0, 0, 0]
    assert all(quota.admits(lane, sequences) for lane in LANES for sequences in (1, 4, 10 * total))


@given(st.lists(st.floats(0, 100), max_size=50), st.lists(st.floats(0, 100), max_size=10))
@settings(deadline=None)
def test_deadlines_are_kept_to_a_tick_and_leave_nothing(times, looks):
    deadlines = Deadlines()
    for number, at in enumerate(times):
        deadlines.add(number, at)
    for now in sorted(looks):
        due = deadlines.due(now)
        assert set(due) >= {number for number, at in enumerate(times) if at <= now - TICK_S}
        assert all(times[number] <= now for number in due)
    for number, at in enumerate(times):
        deadlines.discard(number, at)
    assert not deadlines


def test_the_time_to_come_back_is_that_in_which_the_queue_empties():
    rate = DrainRate()
    assert rate.seconds(0.0, 10) is None
    rate.watch(100.0)
    assert rate.seconds(100.5, 10) is None
    for second in range(100, 140):
        rate.add(float(second), 2)
    assert abs(rate.seconds(139.5, 30) - 15) < 1.5
    assert rate.seconds(140 + WINDOW_S, 30) == float("inf")
    rate.rest()
    assert rate.seconds(200.0, 30) is None


def room_of(**options):
    values = {"sequences": (4,) * 4, "tokens": (100,) * 4, "quantum": QUANTUM, **options}
    return AdmissionQueues(QueueOptions(**values), tokens)


def spec_of(count=1, **fields):
    return common_pb2.SequenceSpec(model="m", token_ids=[1] * count, **fields)


def enter(room, number, spec, now=0.0, **kwargs):
    one = room.entry(number, spec, now, first=False, apart=False)
    room.queue_of("m").check(one, now)
    room.add(one, now)
    return one


def refusal(call, *args):
    try:
        call(*args)
    except Refused as refused:
        return refused.error
    return None


def test_a_queue_is_bounded_in_sequences_and_tokens_of_a_class_and_of_a_tenant():
    room = room_of(tenant_share=0.5)
    for number in range(2):
        enter(room, number, spec_of(tenant="a"))
    error = refusal(enter, room, 2, spec_of(tenant="a"))
    assert error.code == common_pb2.ERROR_CODE_OVERLOADED
    assert "2 sequences (lane-sequences)" in error.message
    assert "tenant-share" in error.message
    # Whoever has no name may have all of it, others their share of what is left.
    assert refusal(enter, room, 3, spec_of(60)) is None
    assert "of this class" in refusal(enter, room, 4, spec_of(60)).message
    assert refusal(enter, room, 5, spec_of(tenant="b")) is None
    assert "4 sequences" in refusal(enter, room, 6, spec_of(tenant="c")).message
    # Other classes are not touched.
    bulk = common_pb2.PRIORITY_CLASS_BULK
    assert refusal(enter, room, 7, spec_of(priority_class=bulk)) is None
    assert len(room) == 5
    view = room.views(3.0)[DEFAULT]
    assert (view.queued_sequences, view.queued_tokens, view.tenants) == (4, 63, 3)
    assert view.oldest_wait_s == 3.0


def test_retry_after_follows_the_rate_within_its_bounds():
    room = room_of(sequences=(100,) * 4, retry_after_ms=500, max_retry_after_ms=9000)
    queue = room.queue_of("m")
    rows = [enter(room, number, spec_of()) for number in range(40)]
    assert queue.retry_after_ms(DEFAULT, 0.0) == 500
    assert queue.retry_after_ms(DEFAULT, 5.0) == 9000
    for number in range(20):
        room.take(rows[number], 10.0 + number / 10)
    assert 9000 >= queue.retry_after_ms(DEFAULT, 12.0) > 2000
    for one in rows[20:]:
        room.remove(one)
    assert queue.retry_after_ms(DEFAULT, 13.0) == 500
    assert (len(room), queue.idle) == (0, True)
