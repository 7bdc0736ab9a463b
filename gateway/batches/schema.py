"""The tables of files and batches."""

from __future__ import annotations

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  purpose TEXT NOT NULL,
  filename TEXT NOT NULL,
  bytes INTEGER NOT NULL DEFAULT 0,
  created REAL NOT NULL,
  expires REAL,
  ready INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX IF NOT EXISTS files_by_age ON files (owner, created);

CREATE TABLE IF NOT EXISTS pieces (
  file TEXT NOT NULL REFERENCES files ON DELETE CASCADE,
  number INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (file, number)
);

CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  cache_salt TEXT NOT NULL,
  status TEXT NOT NULL,
  created REAL NOT NULL,
  expires REAL NOT NULL,
  keep_s REAL NOT NULL,
  runner TEXT,
  lease REAL,
  total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  input TEXT NOT NULL,
  output TEXT NOT NULL,
  errors TEXT NOT NULL,
  batch BLOB NOT NULL
);

CREATE INDEX IF NOT EXISTS batches_by_age ON batches (owner, created);

CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);

CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY, files INTEGER NOT NULL, bytes INTEGER NOT NULL);

INSERT OR IGNORE INTO totals VALUES (1, 0, 0);

CREATE TRIGGER IF NOT EXISTS file_added AFTER INSERT ON files BEGIN
  UPDATE totals SET files = files + 1, bytes = bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS file_changed AFTER UPDATE OF bytes ON files BEGIN
  UPDATE totals SET bytes = bytes - old.bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS file_removed AFTER DELETE ON files BEGIN
  UPDATE totals SET files = files - 1, bytes = bytes - old.bytes;
END"""
