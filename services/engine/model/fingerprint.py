"""What tells the weights of two model directories apart, without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, Final

from services.engine.model.checks import weight_files

# Of each tensor: so many windows of so many bytes, spread from its first byte to its last.
_WINDOWS: Final = 4
_WINDOW_BYTES: Final = 4096


def weights_fingerprint(directory: Path) -> bytes:
    """A digest, 16 bytes, of each tensor's name, dtype, shape and a sample of its bytes.

    How the tensors are spread over files does not count. Training changes numbers all over, so a sample of
    each tensor finds it; one number that somebody changed by hand in a large tensor may stay unseen. The
    files are those that were checked and loaded. Raises OSError.
    """
    digests = sorted(digest for path in weight_files(directory) for digest in _tensors(path))
    return hashlib.blake2b(b"".join(digests), digest_size=16, person=b"catenary weight").digest()


def _tensors(path: Path) -> list[bytes]:
    """A digest of each tensor of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return [_tensor(file.fileno(), 8 + size, name, entry) for name, entry in header.items()]


def _tensor(file: int, base: int, name: str, entry: dict[str, Any]) -> bytes:
    first, end = entry["data_offsets"]
    digest = hashlib.blake2b(repr((name, entry["dtype"], entry["shape"])).encode(), digest_size=16)
    last = max(0, end - first - _WINDOW_BYTES)
    for start in sorted({last * at // (_WINDOWS - 1) for at in range(_WINDOWS)}):
        digest.update(os.pread(file, min(_WINDOW_BYTES, end - first - start), base + first + start))
    return digest.digest()
