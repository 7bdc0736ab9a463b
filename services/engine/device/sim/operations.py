"""What kind of operation one is. Decided once for each overload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from services.engine.device.sim.settings import SimSettings
from services.engine.device.sim.support import base_name, has_kernel, without_int64

# A number for the host, or an answer that the host waits for.
_HOST_READS: Final = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten._is_all_true"}
_COPIES: Final = {"aten._to_copy", "aten.copy_"}
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
# Their schemas do not say that the result shares the argument's storage.
_HIDDEN_VIEWS: Final = {"aten._unsafe_view", "aten._reshape_alias", "aten.lift_fresh"}
# Views that are the same tensor, or that no operation of the bridge makes.
_SAME: Final = {"aten.detach", "aten.alias", *_HIDDEN_VIEWS}
_EMPTY: Final = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
}
# Operations whose integers are some of those that went in, or small: nothing to narrow.
_KEEP_RANGE_NAMES: Final = """
clone index index_select index_copy index_fill index_put gather where cat stack split sort topk argmax
argmin masked_fill minimum maximum clamp clamp_min clamp_max amax amin scatter searchsorted one_hot zero
zeros_like new_zeros zeros ones ones_like embedding flip roll repeat tril triu remainder floor_divide
"""
_KEEP_RANGE: Final = frozenset(_KEEP_RANGE_NAMES.split())


@dataclass(frozen=True, slots=True)
class Operation:
    """name: as "aten.add"; vendor: as the bridge names it, "aten::add.Tensor". overload: torch's object.

    plain: nothing below up to reduces applies.
    host_read: returns a number to the host. copies: between tensors, perhaps to or from the host. dynamic: a
    shape that depends on data; indexing: one with bool indices. fallback: no kernel; without_int64: none for
    int64. reduces: an index_reduce, of which one form has a kernel. view: results share the storage of the
    first argument; shows: in another shape. empty: results hold rubbish. keeps_range: no integer is larger
    than those that go in. writes: positions and names of arguments that are changed, in the order of the
    results; the results are those arguments. returns: how many results.
    """

    name: str
    vendor: str
    overload: Any
    plain: bool
    host_read: bool
    copies: bool
    dynamic: bool
    indexing: bool
    fallback: bool
    without_int64: bool
    reduces: bool
    view: bool
    shows: bool
    empty: bool
    keeps_range: bool
    writes: tuple[tuple[int, str], ...]
    returns: int

    @property
    def moves(self) -> bool:
        """Whether it computes nothing."""
        return self.view or self.copies or self.empty or self.host_read


def describe(func: Any, settings: SimSettings) -> Operation:
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
    view = (aliases and not writes) or name in _HIDDEN_VIEWS
    empty, copies, host_read = name in _EMPTY, name in _COPIES, name in _HOST_READS
    kernel = has_kernel(func, moves=view or empty or copies or host_read)
    short = schema.name.rpartition("::")[2]
    special = {
        "host_read": host_read,
        "copies": copies,
        "dynamic": name in _DYNAMIC,
        "indexing": name in _INDEXING,
        "fallback": not kernel or name in settings.unsupported,
        "without_int64": without_int64(short, settings.device),
        "reduces": base_name(short) == "index_reduce",
    }
    return Operation(
        name=name,
        vendor=func.name(),
        overload=func,
        plain=not any(special.values()),
        **special,
        view=view,
        shows=view and name not in _SAME,
        empty=empty,
        keeps_range=view or base_name(short) in _KEEP_RANGE,
        writes=writes,
        returns=len(schema.returns),
    )
