"""The tensors of a model directory, by name, read one at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from services.engine.model.checks import weight_files
from services.engine.model.errors import ModelError

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Checkpoint:
    """The safetensors files of a directory, a single one or the shards that its index names.

    What the files hold counts, not which shard the index says a tensor lies in. Files are mapped, not read: a
    tensor takes memory while someone holds it. A context manager.
    """

    def __init__(self, directory: Path) -> None:
        """Opens the files. Raises ModelError if one cannot be read or a tensor is in two of them."""
        self.directory = directory
        self._files = ExitStack()
        self._owners: dict[str, Any] = {}
        doubled: set[str] = set()
        try:
            for path in weight_files(directory):
                file = self._files.enter_context(_opened(path))
                names = list(file.keys())
                doubled.update(name for name in names if name in self._owners)
                self._owners.update(dict.fromkeys(names, file))
            if doubled:
                raise ModelError(
                    f"model {directory} has {min(doubled)} and {len(doubled) - 1} more tensors twice"
                )
        except ModelError:
            self._files.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the files' order."""
        return tuple(self._owners)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the host. Raises ModelError if it is not of floats."""
        try:
            tensor: torch.Tensor = self._owners[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"tensor {name} of model {self.directory} cannot be read: {error}") from None
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} of model {self.directory} is of type {kind}: quantized weights?")
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
