"""Where the items of stored responses are, by their ids."""

from __future__ import annotations

from collections.abc import Sequence

import aiosqlite

from gateway.state.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS item_places (
  item_id TEXT NOT NULL,
  response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
  put_out INTEGER NOT NULL,
  place INTEGER NOT NULL
);

CREATE INDEX IF NOT EXISTS item_places_by_id ON item_places (item_id);

CREATE INDEX IF NOT EXISTS item_places_by_response ON item_places (response_id)"""
_AT_A_TIME = 16
# SQLite reads the JSON, beside the loop: of a long conversation one item may be wanted.
_ADD = """
INSERT INTO item_places
SELECT json_extract(value, '$.id'), responses.id, :put_out, key FROM responses, json_each(
  CASE WHEN :put_out THEN json_extract(CAST(response AS TEXT), '$.output') ELSE CAST(items AS TEXT) END
) WHERE responses.id = :id AND json_extract(value, '$.id') IS NOT NULL"""
_FIND = """
SELECT item_id, json_extract(
  CASE WHEN put_out THEN CAST(response AS TEXT) ELSE CAST(items AS TEXT) END,
  CASE WHEN put_out THEN '$.output[' ELSE '$[' END || place || ']'
), response_id FROM item_places JOIN responses ON responses.id = response_id
WHERE owner = ? AND used >= ? AND item_places.rowid IN (
  SELECT max(places.rowid) FROM item_places places JOIN responses ON responses.id = places.response_id
  WHERE owner = ? AND used >= ? AND places.item_id IN ({marks}) GROUP BY places.item_id
)"""


async def add_input(db: aiosqlite.Connection, response_id: str) -> None:
    """Remember where the items of a response's input are."""
    await db.execute(_ADD, {"id": response_id, "put_out": 0})


async def add_output(db: aiosqlite.Connection, response_id: str) -> None:
    """Remember where the items of a final response's output are."""
    await db.execute(_ADD, {"id": response_id, "put_out": 1})


async def find(
    database: Database, owner: str, item_ids: Sequence[str], since: float
) -> list[tuple[str, bytes, str]]:
    """The items with these ids in an owner's responses that were used `since`: each one's id, its JSON and
    its response's id. Of several with an id the one that was stored last."""
    found = []
    for begin in range(0, len(item_ids), _AT_A_TIME):
        some = item_ids[begin : begin + _AT_A_TIME]
        rows = await database.fetch(
            _FIND.format(marks=", ".join("?" * len(some))), (owner, since, owner, since, *some)
        )
        found += [(item_id, text.encode(), response_id) for item_id, text, response_id in rows]
    return found
