"""Makes fake CPU tensors dispatch as CUDA tensors do: autocast's lists, the attention kernel, the fused RMS norm.

A build of torch without CUDA runs no operator on fake CUDA tensors. On CPU tensors, autocast casts other operators and
torch calls other kernels, so a trace of them would describe another program. `dispatch_as_cuda` registers CUDA's
behaviour for the CPU with torch's own `Library`, and removes it at the end. Inside, only fake tensors may be used.

The lists are those of `ATen/autocast_mode.h` in PyTorch 2.13. tests/plan/trace/test_cuda_dispatch.py checks that they
name the operators that the installed torch casts on CUDA; tests/phantom/test_forecast.py compares the operators of
whole steps with torch's CUDA build on the phantom.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_iter, tree_map

from supertuner.plan.trace.cuda_attention import AttentionKernel, AttentionShape, select_attention_kernel

aten = torch.ops.aten
OperatorFunction: TypeAlias = Callable[..., Any]

AUTOCAST_FP32: Final = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist",
    "pdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
AUTOCAST_FP32_OUTPUT: Final = (
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""They get `dtype=torch.float32`, and cast internally."""
AUTOCAST_LOWER_PRECISION: Final = (
    "_convolution", "convolution", "addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv",
)  # fmt: skip
"""In addition to those that CPU autocast lowers too: linear layers, convolutions, matrix products, attention."""
AUTOCAST_PROMOTE: Final = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot",
)  # fmt: skip
"""Cast to the widest type of their arguments."""
NOT_CAST_ON_CUDA: Final = (
    "cat", "stack", "index_copy", "view_as_complex", "polar", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d",
    "fft_fftn", "fft_ifftn", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "quantile", "nanquantile",
)  # fmt: skip
"""Operators that CPU autocast casts and CUDA autocast does not."""

_AUTOCAST_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def dispatch_as_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, operators on fake CPU tensors dispatch as on CUDA tensors of a chip with this compute capability."""
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name in AUTOCAST_FP32:
            library.impl(name, _with_cast_arguments(find_operator(name), _fp32_dtype), "AutocastCPU")
        for name in AUTOCAST_LOWER_PRECISION:
            library.impl(name, _with_cast_arguments(find_operator(name), _lower_precision_dtype), "AutocastCPU")
        for name in AUTOCAST_PROMOTE:
            library.impl(name, _with_cast_arguments(find_operator(name), _widest_dtype), "AutocastCPU")
        for name in AUTOCAST_FP32_OUTPUT:
            library.impl(name, _with_fp32_output(find_operator(name)), "AutocastCPU")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            for name in NOT_CAST_ON_CUDA:
                library.impl(name, fallthrough_kernel, "AutocastCPU", allow_override=True)
        library.impl("scaled_dot_product_attention", _scaled_dot_product_attention(capability), "AutogradCPU")
        library.impl("rms_norm", _rms_norm, "AutogradCPU")
        library.impl("group_norm", _group_norm, "AutogradCPU")
        yield
    finally:
        library._destroy()


def find_operator(name: str) -> Any:
    """torch's operator with this name and overload: `pow.Scalar`."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def _is_castable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _fp32_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    return torch.float32


def _lower_precision_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu")


def _widest_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    dtypes = {leaf.dtype for leaf in tree_iter((args, kwargs)) if _is_castable(leaf)}
    if not dtypes:
        return None
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")


def _with_cast_arguments(
    compute: OperatorFunction, target_dtype: Callable[[Sequence[Any], Mapping[str, Any]], torch.dtype | None]
) -> OperatorFunction:
    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = target_dtype(args, kwargs)

        def one(value: Any) -> Any:
            return value.to(dtype) if dtype is not None and _is_castable(value) and value.dtype != dtype else value

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU_KEYS):
            # From the last argument to the first, as torch's compiled C++ evaluates them: the order of allocations.
            converted = tuple(tree_map(one, value) for value in reversed(args))[::-1]
            return compute(*converted, **tree_map(one, kwargs))

    return cast


def _with_fp32_output(compute: OperatorFunction) -> OperatorFunction:
    def compute_in_fp32(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU_KEYS):
            if _is_castable(args[0]) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return compute(*args, **kwargs)

    return compute_in_fp32


def _scaled_dot_product_attention(capability: tuple[int, int]) -> OperatorFunction:
    def attend(  # many parameters: torch's signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa and query.shape[-3] != key.shape[-3]:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        which = _select_kernel(query, key, attn_mask, dropout_p, capability)
        mask = None if attn_mask is None else _additive_mask(attn_mask, query.dtype)
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        inputs, width, options = (query, key, value), query.shape[-1], (learns, dropout_p, is_causal)
        if which is AttentionKernel.CUDNN:
            found = aten._scaled_dot_product_cudnn_attention(*inputs, mask, *options, False, scale=scale)
        elif which is AttentionKernel.FLASH:
            spare, scale = -width % 8, width**-0.5 if scale is None else scale
            padded = (torch.nn.functional.pad(one, (0, spare)) if spare else one for one in inputs)
            found = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
            return found[0][..., :width]  # type: ignore[no-any-return]
        elif which is AttentionKernel.EFFICIENT:
            mask = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
            found = aten._scaled_dot_product_efficient_attention(*inputs, mask, *options, scale=scale)
        else:
            found = aten._scaled_dot_product_attention_math(*inputs, mask, dropout_p, is_causal, None, scale=scale)
        return found[0]  # type: ignore[no-any-return]

    return attend


def _select_kernel(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, dropout: float, capability: tuple[int, int]
) -> AttentionKernel:
    if query.dim() != 4:
        return AttentionKernel.MATH
    return select_attention_kernel(
        AttentionShape.from_tensors(query, key),
        capability=capability,
        masked=mask is not None,
        mask_requires_grad=mask is not None and mask.requires_grad,
        dropout=dropout > 0,
    )


def _additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as a tensor that is added to the scores: 0 or -inf."""
    if mask.dtype != torch.bool:
        return mask
    attended, masked = mask.new_zeros((), dtype=dtype), mask.new_full((), float("-inf"), dtype=dtype)
    return torch.where(mask, attended, masked)


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm as CUDA differentiates it: one kernel for each pass. Without CUDA, torch decomposes it above
    autograd."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            normed, scale = aten._fused_rms_norm(values, shape, weight, eps)
        ctx.save_for_backward(values, weight, scale)
        ctx.shape = shape
        return normed  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        values, weight, scale = ctx.saved_tensors
        output_mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            gradients = aten._fused_rms_norm_backward(gradient, values, ctx.shape, scale, weight, output_mask)
        return gradients[0], None, gradients[1], None


def _rms_norm(
    values: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is None or weight.dtype == values.dtype:
        return _FusedRmsNorm.apply(values, normalized_shape, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    dimensions = tuple(range(-len(normalized_shape), 0))
    widened = values.float()
    scale = torch.rsqrt(widened.pow(2).mean(dimensions, keepdim=True).add_(eps or torch.finfo(values.dtype).eps))
    return (widened * scale * weight).type_as(values)


def _group_norm(
    values: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """CUDA's kernel requires contiguous values and copies others; the CPU's accepts channels-last too (`group_norm` in
    ATen/native/group_norm.cpp)."""
    batch, channels = values.shape[:2]
    inner = values.numel() // (batch * channels)
    normed = aten.native_group_norm(values.contiguous(), weight, bias, batch, channels, inner, num_groups, eps)
    return normed[0]  # type: ignore[no-any-return]
