"""Which operations have a kernel on the card. The bridge computes all others on the host.

Source: what HabanaAI/gaudi-pytorch-bridge registers (scripts/hpu_op.yaml and scripts/ops_list/kr_ops.hpu;
operations for training and for pictures are left out), and docs/gaudi-facts.md 3.3 for index_reduce.
"""

from __future__ import annotations

from typing import Any, Final

import torch

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
    """Whether the card computes an overload; one that only moves or views data needs no kernel."""
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
    """Whether an operation's kernel does not know int64, on gaudi2 or gaudi3."""
    base = base_name(name)
    return base in _WITHOUT_INT64 or (device == "gaudi3" and base in _WITHOUT_INT64_ON_GAUDI3)


def base_name(name: str) -> str:
    """`add` of `add_`: the bridge has an operation's functional form, or both."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
