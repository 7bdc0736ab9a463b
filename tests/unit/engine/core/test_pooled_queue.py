"""The queue of documents: each one is computed once, the most urgent first, in shapes that are known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.core.pooling import Document, DocumentQueue
from services.engine.model.pooling import EmbedShapes

SHAPES = EmbedShapes(100, 128)


def queue(limit: int = 1000, ageing: int = 4) -> DocumentQueue:
    return DocumentQueue(SHAPES, limit=limit, ageing=ageing)


def document(key: int, length: int = 5, priority: int = 0) -> Document:
    return Document(key, [1] * length, 0, 0, priority)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 100), st.integers(-2, 2)),
            st.tuples(st.just("next"), st.just(0), st.just(0)),
            st.tuples(st.just("end"), st.integers(0, 40), st.just(0)),
            st.tuples(st.just("fail"), st.just(0), st.just(0)),
        ),
        max_size=60,
    )
)
def test_every_document_comes_up_once_whatever_happens(events: list[tuple[str, int, int]]) -> None:
    waiting, known = queue(), dict[int, Document]()
    taken: list[int] = []
    ended: set[int] = set()

    def turn(*, fails: bool) -> bool:
        batch = waiting.next()
        if batch is None:
            return False
        assert (batch.rows, batch.length) in SHAPES.all()
        assert 1 <= len(batch.documents) <= batch.rows
        assert all(len(one.token_ids) <= batch.length and not one.ended for one in batch.documents)
        if fails and len(batch.documents) > 1:
            waiting.alone(batch.documents)
            return True
        for one in batch.documents:
            taken.append(one.key)
            ended.add(one.key)
            waiting.end(one.key)
        return True

    for number, (event, value, priority) in enumerate(events):
        if event == "add":
            known[number] = document(number, value, priority)
            waiting.add(known[number])
        elif event == "end" and value in known:
            waiting.end(value)
            ended.add(value)
        elif event in ("next", "fail"):
            turn(fails=event == "fail")
    while turn(fails=False):
        continue
    assert len(taken) == len(set(taken))
    assert set(known) == ended
    assert (len(waiting), waiting.tokens) == (0, 0)


def test_nobody_starves() -> None:
    waiting = queue(ageing=4)
    waiting.add(document(0, 100, priority=1))
    for key in range(1, 30):
        waiting.add(document(key, 5))
        batch = waiting.next()
        assert batch is not None
        if batch.documents[0].key == 0:
            assert key > 2
            return
        for one in batch.documents:
            waiting.end(one.key)
    raise AssertionError("the less urgent document never came up")
