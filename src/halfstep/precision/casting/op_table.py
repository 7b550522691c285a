"""The one table of which torch operation runs in which format, for every device and every door.

``torch.autocast`` keeps a table per device, in C++, and the two differ: CUDA's sends ``softmax``,
``pow`` and ``layer_norm`` to fp32, the CPU's leaves them in 16 bits, and neither knows what has no
16-bit kernel or a wrong one. Here each operation is named once, in one row, and the row says what
happens to its operands at both doors: under ``*-mixed`` (fp32 weights, operands cast operation by
operation) and under 16-bit weights (nothing is cast where formats agree). ``op_casts.py`` applies
it: under 16-bit weights on every device, under ``*-mixed`` on a CPU. There torch's own autocast is
trusted with nothing but the casts to the compute dtype, whose copies of weights it keeps. On CUDA
``*-mixed`` is torch's autocast alone.

An operation has one name here and many spellings in Python (``torch.softmax``, ``x.softmax``,
``torch.nn.functional.softmax``, ``torch.special.softmax``); they are derived, never listed.

**Source:** torch documentation, "Automatic Mixed Precision", sections "CUDA Ops that can autocast
to float16", "... to float32", "CUDA Ops that promote to the widest input type", and the kernels
that torch registers under the dispatch key AutocastCUDA, which are a few more. What has no 16-bit
kernel, or one that is wrong, is found by ``tests/precision/test_every_function.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

Cast = Literal[
    "as_torch",  # nothing is cast
    "compute",  # operands are cast to the compute dtype, which the result has too
    "compute_of_two",  # the same, only where the dtypes of operands differ
    "fp32",  # 16-bit operands are cast to fp32, and the result is fp32
    "fp32_of_two",  # the same, only where the dtypes of operands differ
    "fp32_inside",  # the same as fp32, and no matmul inside of the operation is cast again
    "widest",  # operands of several dtypes are cast to the widest of them; and fill
    "widest_inside",  # the same, and no matmul inside of the operation is cast again
    "rounded",  # computed in fp32, and the result rounded to the widest of the operands' dtypes
    "rounded_self",  # the same, in place
    "as_given",  # the result is rounded to the dtype of the operand, if it has another; and fill
    "statistics",  # as fp32_of_two, but not the running statistics
    "into_self",  # operands are cast to the dtype of the tensor that is written; and fill
    "fill",  # a finite constant beyond the format becomes the format's largest
    "fill_self",  # the same, in place
    "write",  # nothing is cast, but casts that are kept of what is written go
    "native",  # under *-mixed on a CPU torch's autocast makes this cast to the compute dtype
    "operator",  # the same where torch's autocast casts one: of torch.ops, by its own name
]
Function = Callable[..., Any]


class Row(NamedTuple):
    """Operations, and what is done under ``*-mixed`` and under 16-bit weights."""

    mixed: Cast
    stored: Cast
    names: str


OPS: dict[str, Row] = {
    # cuDNN's kernels for whole recurrent layers also take 16 bits under autocast.
    "matmul": Row("compute", "compute_of_two", """
        addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linear linalg_multi_dot
        linalg_vecdot matmul __rmatmul__ mm mv prelu _convolution conv1d conv2d conv3d conv_tbc
        convolution conv_transpose1d conv_transpose2d conv_transpose3d gru_cell lstm_cell
        rnn_relu_cell rnn_tanh_cell gru lstm rnn_relu rnn_tanh scaled_dot_product_attention
        linear_cross_entropy _grouped_mm grouped_mm
    """),
    # CUDA's autocast promotes these, or does not know them.
    "contraction": Row(
        "widest_inside", "compute_of_two", "bilinear dot embedding_bag inner tensordot vdot"
    ),
    "fp32": Row("fp32", "as_torch", """
        acos arccos asin arcsin cosh erfinv exp expm1 log log10 log1p log2 reciprocal __rdiv__
        __rtruediv__ rsqrt sinh tan pow __pow__ __rpow__ square softplus sum_to_size softmax
        softmin log_softmax logsumexp sum cumsum prod cumprod trapezoid trapz cumulative_trapezoid
        norm frobenius_norm linalg_vector_norm norm_except_dim renorm normalize upsample_bicubic2d
        upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d
    """),
    "norm": Row("fp32", "fp32_of_two", """
        group_norm layer_norm native_group_norm native_layer_norm rms_norm cosine_similarity dist
        pairwise_distance
    """),
    "statistics": Row("as_torch", "statistics", "batch_norm instance_norm native_batch_norm"),
    # A bf16 loss has only 8 bits, and in fp16 the loss scale of 65536 is itself infinite.
    "loss": Row("fp32", "fp32", """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
        cross_entropy_loss ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div
        l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
        nll_loss2d multilabel_soft_margin_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
        triplet_margin_loss triplet_margin_with_distance_loss
    """),
    # Some device has no 16-bit kernel, forward or backward, or a wrong one (matrix_exp). A later
    # row has the last word where spellings meet: torch.sparse.mm is not torch.mm.
    "no_16_bits": Row("fp32_inside", "fp32_inside", """
        binomial sparse_mm sparse_addmm smm hspmm sspaddmm sparse_softmax sparse_log_softmax
        sparse_sampled_addmm cdist cholesky cholesky_inverse cholesky_solve complex det geqrf
        histogram histogramdd inverse logdet lu lu_solve nanquantile ormqr orgqr pca_lowrank pdist
        pinverse polar qr quantile slogdet stft svd svd_lowrank triangular_solve vander
        view_as_complex _upsample_bilinear2d_aa _upsample_bicubic2d_aa _dirichlet_grad
        _sample_dirichlet _standard_gamma linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
        linalg_lu linalg_lu_factor linalg_lu_solve linalg_lu_factor_ex linalg_matrix_exp
        linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve
        linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
        linalg_tensorsolve linalg_vander matrix_exp matrix_power nuclear_norm fft_fft fft_fft2
        fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2
        fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn special_airy_ai
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx
        special_i1 special_i1e special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
        special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
        special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
        special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
        special_spherical_bessel_j0 special_zeta
    """),
    # The same where a forward goes on in 16 bits. A 16-bit grid_sample rounds positions in pixels.
    "rounded": Row("rounded", "rounded", """
        avg_pool3d grid_sample grid_sampler grid_sampler_2d grid_sampler_3d logcumsumexp rrelu
    """),
    "matrix_norm": Row("fp32", "rounded", "linalg_norm linalg_matrix_norm"),  # of singular values
    "rounded_self": Row("rounded_self", "rounded_self", "rrelu_"),
    # torch's CPU autocast computes these in fp32; CUDA's own kernels answer as given.
    "as_given": Row("as_given", "as_torch", """
        adaptive_avg_pool3d adaptive_max_pool3d max_pool3d fractional_max_pool2d
        fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d trace
    """),
    # CUDA's autocast promotes these; without it torch does so itself.
    "promoted": Row("widest", "as_torch", "addcdiv addcmul atan2 arctan2"),
    "joined": Row("as_torch", "as_torch", "cat stack"),  # on a CPU torch's autocast, too
    # torch refuses operands of several dtypes.
    "widest": Row("widest", "widest", """
        allclose cartesian_prod cross heaviside index_add index_copy index_put index_reduce isclose
        lerp linalg_cross masked_scatter meshgrid put scatter scatter_add scatter_reduce
    """),
    "into_self": Row("into_self", "into_self", """
        __setitem__ addbmm_ addmm_ addmv_ addr_ baddbmm_ heaviside_ index_add_ index_copy_
        index_put_ index_reduce_ lerp_ masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_
    """),
    # torch raises an error for such a constant, or writes an infinity.
    "fill": Row("fill", "fill", """
        clamp clamp_max clamp_min clip constant_pad_nd fill full full_like hardshrink hardtanh
        softshrink pad_sequence index_fill masked_fill new_full threshold where
    """),
    "fill_self": Row("fill_self", "fill_self", """
        clamp_ clamp_max_ clamp_min_ clip_ fill_ fill_diagonal_ hardtanh_ index_fill_ masked_fill_
        threshold_
    """),
    "pad": Row("as_given", "fill", "pad"),
}  # fmt: skip

# --- spellings ------------------------------------------------------------------------------------

_NAMESPACES: tuple[tuple[Any, str], ...] = (
    (torch, ""),
    (torch._C._VariableFunctions, ""),
    (torch.Tensor, ""),
    (F, ""),
    (torch._C._nn, ""),
    (torch.special, "special_"),
    (torch.linalg, "linalg_"),
    (torch.fft, "fft_"),
    (torch.sparse, "sparse_"),
)
"""Where Python finds operations, and the prefix that the operation's own name has there."""


def spellings(name: str) -> Iterator[tuple[str, Function]]:
    """Every Python function that runs the operation ``name``, with its path."""
    for space, prefix in _NAMESPACES:
        for spelled in {name, name.removeprefix(prefix)}:
            found = getattr(space, spelled, None)
            if callable(found):
                where = getattr(space, "__qualname__", None) or getattr(space, "__name__", "")
                yield f"{where}.{spelled}", found


NATIVE_ON_CPU = frozenset(
    name.removeprefix("aten::").partition(".")[0]
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
)
"""Operations that torch's CPU autocast casts itself, and whose cast weights it caches."""
# What writes in place is cast nowhere, but casts that are kept of what it writes must go.
_IN_PLACE = {n for space, _ in _NAMESPACES for n in dir(space) if n[-1] == "_" != n[-2:-1]}
_IN_PLACE |= {"numpy"}  # which shares the memory
MIXED_ON_CPU: dict[Function, Cast] = {
    function: "write" for name in _IN_PLACE for _, function in spellings(name)
}
MIXED_ON_CPU |= {
    function: "native" if row.mixed == "compute" and name in NATIVE_ON_CPU else row.mixed
    for row in OPS.values()
    for name in row.names.split()
    for _, function in spellings(name)
    if row.mixed != "as_torch"
}
"""What is done under ``*-mixed`` on a CPU."""
_data: Any = torch.Tensor.data
MIXED_ON_CPU[_data.__set__] = "write"
STORED: dict[Function, Cast] = {
    function: row.stored
    for row in OPS.values()
    for name in row.names.split()
    for _, function in spellings(name)
    # F.batch_norm, whose argument order differs, calls torch.batch_norm
    if row.stored != "as_torch"
    and not (row.stored == "statistics" and isinstance(function, FunctionType))
}
"""What is done under 16-bit weights on every device."""

# --- casts of weights that autocast keeps --------------------------------------------------------
#
# torch uses its cast of a weight until the outermost context ends, whatever is written into the
# weight meanwhile. Here casts go before a written weight is used. On a CPU the mode sees products
# and writes; elsewhere there is none, and a call of the model looks at its weights. ``p.data`` has
# a version of its own: writes through it are known by their memory alone, and not without a mode.

WRITES = ("write", "into_self", "fill_self", "rounded_self")
OPERATORS = (OpOverload, OpOverloadPacket)  # called as such, by an exported program too
_here = threading.local()  # casting: this thread runs an operation whose casts are kept


class _Kept(NamedTuple):
    """Of what torch may keep casts, from one drop to the next; other threads drop them, too."""

    seen: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]]  # by id: version and address
    memory: dict[int, StorageWeakRef]  # by where it begins, while these live


_kept: _Kept | None = None


def drop_casts() -> None:
    """Drop all casts, which torch keeps for the whole process.

    Python's garbage collector, or another thread, may end a context that drops them at any time.
    While torch makes one it holds a lock: then they go at the end of the operation.
    """
    global _kept
    _kept = None  # first, so that who makes a cast meanwhile finds that it is noted nowhere
    if not getattr(_here, "casting", False):
        torch.clear_autocast_cache()


def run_native(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose operands torch's autocast casts; it keeps the casts of weights."""
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)  # a graph casts weights whenever it runs
    kept = before_use((*args, *kwargs.values()))
    outer, _here.casting = getattr(_here, "casting", False), True
    try:
        return func(*args, **kwargs)
    finally:
        _here.casting = outer
        if kept is None or kept is not _kept:
            drop_casts()


def before_use(values: tuple[Any, ...] | list[Any]) -> _Kept | None:
    """Drop the casts if one of these was written since it was used; only weights have casts.

    Returns where these are noted, or None if one cannot be asked: its casts must not be kept.
    """
    global _kept
    kept, known = _kept, True
    if kept is None:
        drop_casts()  # which somebody else may not have finished
        kept = _kept = _Kept({}, {})
    for value in values:
        if isinstance(value, list | tuple):
            known = before_use(value) is kept and known
        elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            if type(value) is FakeTensor:  # whose address is not to be asked
                continue
            try:
                now, seen = (value._version, value.data_ptr()), kept.seen.get(id(value))
                if seen is None or seen[0]() is not value:  # another may get its id
                    kept.seen[id(value)] = weakref.ref(value), now
                    storage = value.untyped_storage()
                    kept.memory[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                elif seen[1] != now:
                    drop_casts()
                    return before_use(values)
            except RuntimeError:  # it has no version, or no memory: in torch.func, a DTensor
                known = False
    return kept if known else None


def before_write(values: Iterable[Any]) -> None:
    """Drop the casts if a function is about to write a weight, or memory that is a weight's."""
    kept = _kept
    if kept is None or torch.compiler.is_compiling():
        return
    for value in values:
        if isinstance(value, list | tuple):
            before_write(value)
        # what has a graph shares no memory
        elif isinstance(value, Tensor) and value.is_leaf and type(value) is not FakeTensor:
            with suppress(RuntimeError):  # of what has no memory no cast is kept
                owner = kept.memory.get(value.untyped_storage().data_ptr())
                if owner is not None and not owner.expired():  # type: ignore[no-untyped-call]
                    drop_casts()


def before_forward(weights: Iterable[Tensor], seen: list[Any], *_: object) -> None:
    """Drop the casts if weights are not as ``seen``, or gradients were turned on or off since."""
    if not torch.compiler.is_compiling():
        now = [
            (id(w), w._version, w.data_ptr() if issubclass(type(w), nn.Parameter) else 0)
            for w in weights
        ]
        if seen != [torch.is_grad_enabled(), now]:
            seen[:] = torch.is_grad_enabled(), now
            drop_casts()


def before_call(
    cast: Cast | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Cast | None:
    """Let go of the casts that are kept of what a function writes, and say how it is cast."""
    if cast is None and type(func) in OPERATORS and not torch.compiler.is_compiling():
        one = func if type(func) is OpOverload else getattr(func, func.overloads()[0])
        before_write((*args, *kwargs.values()) if one._schema.is_mutable else ())
        cast = "operator"
    before_write((kwargs.get("out"), *(args[:1] if cast in WRITES else ())))
    return None if cast == "write" else cast
