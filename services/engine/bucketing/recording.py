"""Records what a running engine serves, so that buckets can be learned from it: lengths and step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from services.engine.bucketing.bucket import Bucket

_MAX_BYTES: Final = 64 << 20
_BUFFERED_LINES: Final = 256
_MAX_SHAPES: Final = 1024

_Shape = tuple[Bucket | None, Bucket | None]


class Recorder:
    """Appends JSON lines to a file: one for each sequence that ended, and sums of the steps' times.

    Lines are buffered, and steps of the same two buckets are added up between two writes, so that a step
    costs a dictionary access. Nothing is recorded beyond `max_bytes`, earlier runs' lines included, nor after
    a failed write: recording must never stop an engine.
    """

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, buffered: int = _BUFFERED_LINES) -> None:
        """Raise ValueError if the file cannot be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._buffered = buffered
        self._lines: list[str] = []
        self._steps: dict[_Shape, list[float]] = {}
        try:
            with path.open("a", encoding="utf-8") as file:
                self._bytes = file.tell()
        except OSError as error:
            raise ValueError(f"length file {path} cannot be written: {error.strerror}") from None
        self._full = self._bytes >= max_bytes

    @property
    def full(self) -> bool:
        """True once nothing more is recorded."""
        return self._full

    def sequence(self, prompt_tokens: int, output_tokens: int) -> None:
        """Note the lengths of a sequence that ended. One without output is left out."""
        if self._full or output_tokens < 1:
            return
        self._lines.append(f'{{"prompt_tokens": {prompt_tokens}, "output_tokens": {output_tokens}}}\n')
        if len(self._lines) >= self._buffered:
            self.flush()

    def step(self, prefill: Bucket | None, decode: Bucket | None, seconds: float) -> None:
        """Note the time of a step with these buckets."""
        if self._full:
            return
        entry = self._steps.get((prefill, decode))
        if entry is None:
            if len(self._steps) >= _MAX_SHAPES:
                self.flush()
            self._steps[prefill, decode] = [1, seconds]
        else:
            entry[0] += 1
            entry[1] += seconds

    def flush(self) -> None:
        """Write what is buffered, as far as the limit allows."""
        if self._full:
            return
        lines = self._lines + [
            json.dumps(
                {
                    "prefill": _numbers(prefill),
                    "decode": _numbers(decode),
                    "steps": int(steps),
                    "seconds": round(seconds, 6),
                }
            )
            + "\n"
            for (prefill, decode), (steps, seconds) in self._steps.items()
        ]
        self._lines, self._steps = [], {}
        room = self._max_bytes - self._bytes
        kept: list[str] = []
        for line in lines:
            room -= len(line)
            if room < 0:
                self._full = True
                break
            kept.append(line)
        text = "".join(kept)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            self._full = True
        self._bytes += len(text)


def _numbers(bucket: Bucket | None) -> list[int] | None:
    return None if bucket is None else [bucket.batch, bucket.query, bucket.context_blocks]
