"""A pooled core's loop in this process."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from services.engine.core.loop import CoreLoop
from services.engine.core.pooling import PoolingEngine
from services.engine.core.startup import open_engine
from services.engine.domain import PoolingOptions, SamplingOptions
from services.engine.link import EndRow, SubmitSequence
from services.engine.model import Task
from tests.support.torch_engine import MemoryLink, tiny_options


def document(key: int, ids: list[int], *, priority: int = 0, **pooling: Any) -> SubmitSequence:
    """A document as the servicer hands it to a core."""
    options = PoolingOptions(**pooling)
    return SubmitSequence(
        key, ids, len(ids), SamplingOptions(), 0, 0, [], False, priority=priority, pooling=options
    )


def open_pooling(directory: Path, task: Task = Task.EMBED, **options: Any) -> PoolingEngine:
    """The engine of a small float32 core that pools."""
    engine = open_engine(tiny_options(directory, **options), directory, task, lambda activity, fraction: None)
    if not isinstance(engine, PoolingEngine):
        raise AssertionError(f"{task} is not pooled")
    return engine


class LocalPooledCore:
    """Runs documents through the loop of a small float32 core."""

    def __init__(self, directory: Path, task: Task = Task.EMBED, **options: Any) -> None:
        values = {"max_num_batched_tokens": 600, **options}
        self.engine = open_pooling(directory, task, **values)
        self.link = MemoryLink()
        link: Any = self.link
        self.loop = CoreLoop(link, self.engine)

    def run(self) -> list[int]:
        """Turns of the loop until no document lives; keys in the order in which they ended."""
        while self.loop.work.busy:
            self.loop.advance()
        self.loop.advance()
        return [key for message in self.link.sent for key in message.columns.keys]

    @property
    def ends(self) -> dict[int, EndRow]:
        """What became of each document, by key."""
        return {
            message.columns.keys[end.row]: end for message in self.link.sent for end in message.columns.ends
        }

    def vectors(self, documents: list[list[int]], **pooling: Any) -> list[list[float]]:
        """The vector of each document, all submitted at once; `pooling` has a list for each option."""
        for key, ids in enumerate(documents, 1):
            options = {name: values[key - 1] for name, values in pooling.items()}
            self.loop.handle(document(key, ids, **options))
        self.run()
        found = [unpack(self.ends[key].vector) for key in range(1, len(documents) + 1)]
        self.link.sent.clear()
        return found


def unpack(vector: bytes | None) -> list[float]:
    """The numbers of a vector. Raises AssertionError if there is none."""
    if vector is None:
        raise AssertionError("there is no vector")
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
