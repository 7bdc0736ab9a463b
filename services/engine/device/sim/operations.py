"""Which kind an operation is, what the card refuses of it, and how its results become tensors.

Source: what HabanaAI/gaudi-pytorch-bridge registers (scripts/hpu_op.yaml and scripts/ops_list/kr_ops.hpu;
operations for training and for pictures are left out), and docs/gaudi-facts.md 3.3 for index_reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from services.engine.device.sim.compile_only import spoil
from services.engine.device.sim.settings import (
    SimSettings,
    dynamic_in_capture,
    fallback_in_capture,
    host_copy_in_capture,
    host_read_in_capture,
    mixed_devices,
)
from services.engine.device.sim.tensor import Call, Hbm, SimTensor

_KERNELS_NAMES: Final = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _copy_from _fused_dropout _local_scalar_dense
_log_softmax _logcumsumexp _masked_scale _softmax _to_copy _unique _unique2 _unsafe_index _unsafe_view abs
acos acosh add addbmm addcdiv addcmul addmm addmv addr all amax amin aminmax any arange argmax argmin
as_strided_scatter asin asinh atan atan2 atanh avg_pool2d avg_pool3d baddbmm bernoulli bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bucketize cat ceil
channel_shuffle cholesky clamp clamp_max clamp_min clone complex constant_pad_nd convolution
convolution_overrideable copy copysign cos cosh count_nonzero cumprod cumsum diag div dot elu embedding
empty eq equal erf erfc erfinv exp exp2 expm1 exponential eye fill flatten flip floor floor_divide fmax
fmin fmod frac frexp full gather ge gelu geometric glu gt hardshrink hardsigmoid hardswish hardtanh
heaviside hypot index index_add index_copy index_fill index_put index_reduce index_select isfinite isin
isinf isnan isneginf isposinf kthvalue le leaky_relu lerp linalg_cross linalg_vector_norm linear linspace
log log10 log1p log2 log_normal log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and
logical_not logical_or logical_xor logit logspace lt masked_fill masked_scatter masked_select matmul max
max_pool2d_with_indices max_pool3d_with_indices maximum mean median min minimum mish mm mul multinomial mv
nan_to_num nansum native_batch_norm native_dropout native_group_norm native_layer_norm ne neg nextafter
nonzero norm normal one_hot poisson pow prod random randperm reciprocal relu remainder repeat
repeat_interleave resize roll round rsqrt rsub scalar_tensor scatter scatter_add scatter_reduce
searchsorted select_scatter sgn sigmoid sign signbit silu sin sinc sinh slice_scatter softplus softshrink
sort special_entr special_erfcx special_xlog1py sqrt stack std std_mean sub sum take tan tanh threshold
topk trace tril tril_indices triu triu_indices trunc uniform unique_dim var var_mean vdot where xlogy zero
"""
_KERNELS: Final = frozenset(_KERNELS_NAMES.split())
# Their kernels take int32, and int64 where that is int32 anyway (the same file's lists of dtypes).
_WITHOUT_INT64: Final = frozenset(
    {"flip", "gather", "index_add", "roll", "scatter", "scatter_add", "scatter_reduce", "take", "topk"}
)
# Sums of int64 are Gaudi2's alone.
_WITHOUT_INT64_ON_GAUDI3: Final = frozenset({"sum"})


def has_kernel(func: Any, *, moves: bool) -> bool:
    """Return whether the card computes an overload; one that only moves or views data needs no kernel."""
    space, _, name = func._schema.name.partition("::")
    if moves or space == "hpu":
        return True
    if space != "aten":
        return False
    if base_name(name) in _KERNELS:
        return True
    # These run as other operations, each of which is looked at when its turn comes.
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd")


def without_int64(name: str, device: str) -> bool:
    """Return whether an operation's kernel does not know int64, on gaudi2 or gaudi3."""
    base = base_name(name)
    return base in _WITHOUT_INT64 or (device == "gaudi3" and base in _WITHOUT_INT64_ON_GAUDI3)


def base_name(name: str) -> str:
    """`add` of `add_`: the bridge has an operation's functional form, or both."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


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
    """Read an overload's schema."""
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


def goes_to_host(operation: Operation, call: Call, args: tuple[Any, ...]) -> bool:
    """Return whether the host gets the result. Raises SimError where host and device tensors are mixed."""
    if call.host and not operation.copies:
        raise mixed_devices(operation.name)
    if operation.copies and call.tensors:
        return call.device == "cpu" or (operation.name == "aten.copy_" and type(args[0]) is not SimTensor)
    return operation.host_read


def depends_on_data(operation: Operation, call: Call) -> bool:
    """Return whether the result's shape is known only after computing it."""
    return operation.dynamic or (operation.indexing and call.bool_index)


def falls_back(operation: Operation, call: Call, *, wide_integers: bool) -> bool:
    """Return whether the host computes it: no kernel at all, or none for float64 or int64."""
    if operation.fallback or (operation.reduces and not _reduces_on_card(call)):
        return True
    if call.double:
        # No kernel of the card takes float64; the copies cast it.
        return not operation.moves
    if operation.without_int64 and wide_integers and call.tensors:
        return call.tensors[0].raw.dtype is torch.int64
    return False


def _reduces_on_card(call: Call) -> bool:
    """Of index_reduce(self, dim, index, source, reduce, include_self) the bridge has one form alone."""
    reduce = call.args[4] if len(call.args) > 4 else call.kwargs["reduce"]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs["dim"]
    return reduce == "amax" and dim == 0 and bool(call.kwargs.get("include_self", True))


def check_capture(operation: Operation, call: Call, *, to_host: bool, dynamic: bool, fallback: bool) -> None:
    """Raise SimError for what cannot be captured into an HPU graph (gaudi-facts.md 4.2)."""
    if call.host:
        raise host_copy_in_capture()
    if to_host:
        raise host_read_in_capture(operation.name)
    if dynamic:
        raise dynamic_in_capture(operation.name)
    if fallback:
        raise fallback_in_capture(operation.vendor)


_INT32: Final = torch.iinfo(torch.int32)


class Results:
    """Gives results their share of the memory, and the values that the device can hold.

    touch: acquires the card, which the first tensor does.
    """

    def __init__(self, hbm: Hbm, touch: Callable[[], None], *, wide_integers: bool) -> None:
        self._hbm = hbm
        self._touch = touch
        self._wide_integers = wide_integers

    def wrap(
        self, operation: Operation, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Return the operation's result with tensors of the device. Raises SimError if the memory is full."""
        if operation.writes:
            return self._written(operation, args, kwargs)
        if call.device == "cpu":
            return result
        if isinstance(result, torch.Tensor):
            return self._one(operation, call, result)
        if isinstance(result, (list, tuple)):
            return type(result)(
                self._one(operation, call, one) if isinstance(one, torch.Tensor) else one for one in result
            )
        return result

    def new(self, raw: torch.Tensor, *, narrow: bool = True) -> SimTensor:
        """A new tensor of the device with this data. Raises SimError if the memory is full."""
        self._touch()
        tensor = SimTensor(raw, self._hbm.take(raw.untyped_storage().nbytes()))
        if narrow:
            self.narrow(raw)
        return tensor

    def narrow(self, raw: torch.Tensor) -> None:
        """Change values that the device cannot hold, as it would.

        gaudi-facts.md 4.7: int64 is int32 in silence. The bridge's copies cast float64 likewise
        (`_local_scalar_dense` in gaudi-pytorch-bridge reads a float of a Double).
        """
        if raw.dtype is torch.int64:
            if not self._wide_integers and raw.numel():
                low, high = torch.aminmax(raw)
                if int(high) > _INT32.max or int(low) < _INT32.min:
                    raw.copy_(raw.to(torch.int32))
        elif raw.dtype is torch.float64:
            raw.copy_(raw.to(torch.float32))

    def _written(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [
            args[position] if position < len(args) else kwargs[name] for position, name in operation.writes
        ]
        if not operation.keeps_range:
            for tensor in written:
                if type(tensor) is SimTensor:
                    self.narrow(tensor.raw)
        if operation.returns == 0:
            return None
        return written[0] if operation.returns == 1 else tuple(written)

    def _one(self, operation: Operation, call: Call, raw: torch.Tensor) -> SimTensor:
        if operation.view and call.tensors:
            base = call.tensors[0]
            return SimTensor(raw, base.block, base.derived or operation.shows)
        if operation.empty:
            spoil(raw)
        return self.new(raw, narrow=not operation.keeps_range)
