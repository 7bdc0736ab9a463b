"""What kind of operation one is. Decided once for each overload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_HOST_READS: Final = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten._is_all_true"}
# Their results' shapes are known only once the device has computed.
_DYNAMIC: Final = {
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.bincount",
    "aten.repeat_interleave",
    "aten.argwhere",
}
_INDEXING: Final = {"aten.index", "aten.index_put", "aten.index_put_", "aten._unsafe_index"}
# No public source shows a kernel of these for HPU; the bridge computes what it has no kernel for on the host.
_WITHOUT_KERNEL: Final = {
    "aten.searchsorted",
    "aten.bucketize",
    "aten.nextafter",
    "aten.nextafter_",
    "aten.frexp",
    "aten.histc",
    "aten.histogram",
    "aten.kthvalue",
    "aten.mode",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """name: as "aten.add"; overload with it in `key`.

    host_read: returns a number to the host. dynamic: a shape that depends on data; indexing: one with bool
    indices. view: results share the storage of the first argument. writes: positions and names of arguments
    that are changed, in the order of the results; the results are those arguments.
    """

    name: str
    host_read: bool
    dynamic: bool
    indexing: bool
    fallback: bool
    view: bool
    writes: tuple[tuple[int, str], ...]
    returns: int


def describe(func: Any, unsupported: frozenset[str]) -> Operation:
    """Reads an overload's schema."""
    schema = func._schema
    name = schema.name.replace("::", ".")
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments
    )
    return Operation(
        name=name,
        host_read=name in _HOST_READS,
        dynamic=name in _DYNAMIC,
        indexing=name in _INDEXING,
        fallback=name in _WITHOUT_KERNEL or name in unsupported,
        view=aliases and not writes,
        writes=writes,
        returns=len(schema.returns),
    )
