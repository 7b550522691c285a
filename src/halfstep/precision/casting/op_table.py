"""The one table of which torch operation runs in which format, for every device.

``torch.autocast`` keeps a table per device, in C++, and the two differ: CUDA's sends ``softmax``,
``pow`` and ``layer_norm`` to fp32, the CPU's leaves them in 16 bits. Here CUDA's documented lists
are written down once; ``op_casts.py`` applies them on a CPU, so that a laptop
computes in the formats of a GPU. Policies with 16-bit weights cast nothing operation by operation;
for them the second half of the table says how operands of two dtypes are promoted.

An operation has one name here and many spellings in Python (``torch.softmax``, ``x.softmax``,
``torch.nn.functional.softmax``, ``torch.special.softmax``); they are derived, never listed.

**Source:** torch documentation, "Automatic Mixed Precision", sections "CUDA Ops that can autocast
to float16", "... to float32", "CUDA Ops that promote to the widest input type", and the kernels
that torch registers under the dispatch key AutocastCUDA, which are a few more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cast = Literal["half", "fp32", "widest", "as_given", "into_self", "product", "write"]
Mixed = Literal["product", "statistics", "norm", "fp32", "loss", "widest", "into_self"]
Function = Callable[..., Any]

# --- *-mixed: fp32 weights, operands cast operation by operation ----------------------------------

AUTOCAST: dict[Cast, tuple[str, ...]] = {
    # Operands are cast to the compute dtype, which the result has too.
    "half": (
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linear"),
        *("linalg_multi_dot", "linalg_vecdot", "matmul", "__rmatmul__", "mm", "mv", "prelu"),
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
        # cuDNN's kernels for whole recurrent layers also take 16 bits under autocast
        *("gru", "lstm", "rnn_relu", "rnn_tanh"),
        "scaled_dot_product_attention",
    ),
    # 16-bit operands are cast to fp32, and the result is fp32.
    "fp32": (
        *("acos", "arccos", "asin", "arcsin", "cosh", "erfinv", "exp", "expm1", "log", "log10"),
        *("log1p", "log2", "reciprocal", "__rdiv__", "__rtruediv__", "rsqrt", "sinh", "tan"),
        *("pow", "__pow__", "__rpow__", "square", "softplus", "sum_to_size"),
        *("softmax", "softmin", "log_softmax", "logsumexp"),
        *("sum", "cumsum", "prod", "cumprod", "trapezoid", "trapz", "cumulative_trapezoid"),
        *("group_norm", "layer_norm", "native_layer_norm", "rms_norm"),
        *("norm", "frobenius_norm", "nuclear_norm", "linalg_vector_norm", "linalg_matrix_norm"),
        *("linalg_norm", "norm_except_dim", "renorm", "normalize"),
        *("cdist", "dist", "pdist", "pairwise_distance", "cosine_similarity"),
        *("upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d"),
        *("upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d"),
        *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d"),
        *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
        *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy"),
        *("cross_entropy_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss"),
        *("margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss"),
        *("nll_loss", "nll_loss2d", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
        "triplet_margin_loss",
    ),
    # Operands of several dtypes are cast to the widest of them.
    "widest": (
        *("addcdiv", "addcmul", "atan2", "arctan2", "bilinear", "cat", "cross", "dot"),
        *("grid_sampler", "grid_sample", "index_put", "scatter_add", "stack", "tensordot", "vdot"),
    ),
    # These are in none of CUDA's lists but in the CPU's, which computes them in fp32: the result is
    # rounded to the dtype of the input, as CUDA's own kernels do.
    "as_given": (
        *("adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d"),
        *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
        *("replication_pad3d", "pad", "trace"),
    ),
}

# --- 16-bit weights: nothing is cast where formats agree ------------------------------------------

MIXED: dict[Mixed, tuple[str, ...]] = {
    # Operands of several dtypes, one of them the compute dtype: all are cast to that.
    "product": (
        *(name for name in AUTOCAST["half"]),
        *("bilinear", "dot", "inner", "tensordot", "vdot", "embedding_bag", "linear_cross_entropy"),
        *("sparse_mm", "sparse_addmm", "spmm"),
    ),
    # Operands of several dtypes: 16-bit ones are cast to fp32, but not the running statistics.
    "statistics": ("batch_norm", "instance_norm", "native_batch_norm"),
    # Operands of several dtypes are cast to fp32, and the result is fp32.
    "norm": (
        *("group_norm", "layer_norm", "native_group_norm", "native_layer_norm", "rms_norm"),
        *("cosine_similarity", "dist", "pairwise_distance"),
    ),
    # Some device has no 16-bit kernel: 16-bit operands are cast to fp32, and the result is fp32.
    "fp32": (
        *("cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "complex", "det", "geqrf"),
        *("histogram", "histogramdd", "inverse", "logdet", "lu", "lu_solve", "nanquantile"),
        *("ormqr", "orgqr", "pca_lowrank", "pdist", "pinverse", "polar", "qr", "quantile"),
        *("slogdet", "stft", "svd", "svd_lowrank", "triangular_solve", "view_as_complex"),
        *("linalg_cholesky", "linalg_cholesky_ex", "linalg_cond", "linalg_det", "linalg_eig"),
        *("linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "linalg_householder_product"),
        *("linalg_inv", "linalg_inv_ex", "linalg_ldl_factor", "linalg_ldl_factor_ex"),
        *("linalg_ldl_solve", "linalg_lstsq", "linalg_lu", "linalg_lu_factor", "linalg_lu_solve"),
        *("linalg_lu_factor_ex", "linalg_matrix_exp", "linalg_matrix_rank", "linalg_pinv"),
        *("linalg_qr", "linalg_slogdet", "linalg_solve", "linalg_solve_ex", "linalg_vander"),
        *("linalg_solve_triangular", "linalg_svd", "linalg_svdvals", "linalg_tensorinv"),
        *("linalg_tensorsolve", "matrix_exp", "nuclear_norm"),
        *("fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_hfft2", "fft_hfftn", "fft_ifft"),
        *("fft_ifft2", "fft_ifftn", "fft_ihfft", "fft_ihfft2", "fft_ihfftn", "fft_irfft"),
        *("fft_irfft2", "fft_irfftn", "fft_rfft", "fft_rfft2", "fft_rfftn"),
    ),
    # torch's loss functions: 16-bit operands are always cast to fp32, and the result is fp32. A
    # bf16 loss has only 8 bits, and in fp16 the loss scale of 65536 is itself infinite.
    "loss": (
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss"),
        *("cross_entropy", "cross_entropy_loss", "ctc_loss", "gaussian_nll_loss"),
        *("hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss"),
        *("mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "nll_loss2d"),
        *("multilabel_soft_margin_loss", "poisson_nll_loss", "smooth_l1_loss"),
        *("soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss"),
    ),
    # torch refuses operands of several dtypes: all are cast to the widest of them.
    "widest": (
        *("cartesian_prod", "cross", "grid_sample", "grid_sampler", "grid_sampler_2d"),
        *("grid_sampler_3d", "heaviside", "index_add", "index_copy", "index_put", "index_reduce"),
        *("lerp", "linalg_cross", "masked_scatter", "meshgrid", "put", "scatter", "scatter_add"),
        *("scatter_reduce", "allclose", "isclose"),
    ),
    # The same in place: operands are cast to the dtype of the tensor that is written.
    "into_self": (
        *("__setitem__", "addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_", "index_add_"),
        *("index_copy_", "index_put_", "index_reduce_", "lerp_", "masked_scatter_", "put_"),
        *("scatter_", "scatter_add_", "scatter_reduce_"),
    ),
}

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


def functions(names: Iterable[str]) -> Iterator[Function]:
    """Every Python function that runs one of the named operations."""
    for name in names:
        for _, function in spellings(name):
            yield function


NATIVE_ON_CPU = frozenset(
    name.removeprefix("aten::").partition(".")[0]
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
)
"""Operations that torch's CPU autocast casts itself, and whose cast weights it caches."""
AUTOCAST_ON_CPU: dict[Function, Cast] = {
    function: cast
    for cast, names in AUTOCAST.items()
    for name in names
    if name not in NATIVE_ON_CPU or cast == "as_given" or name == "grid_sampler"
    for _, function in spellings(name)
}
"""What torch's CPU autocast leaves to do. It always widens ``grid_sampler``, so that is here."""
_CAST_ANYWAY = frozenset(name for names in AUTOCAST.values() for name in names)
# torch's autocast refuses, on every device, a source whose dtype differs from the tensor that it is
# written into, and products of two dtypes in the backward of a user's Function.
AUTOCAST_ON_CPU |= {f: "product" for f in functions(AUTOCAST["half"]) if f not in AUTOCAST_ON_CPU}
AUTOCAST_ON_CPU |= {
    f: "widest" for f in functions(n for n in MIXED["widest"] if n not in _CAST_ANYWAY)
}
AUTOCAST_ON_CPU |= {f: "into_self" for f in functions(MIXED["into_self"])}
# What writes in place is cast nowhere, but casts that are kept of what it writes must go.
_IN_PLACE = {n for space, _ in _NAMESPACES for n in dir(space) if n[-1] == "_" != n[-2:-1]}
_IN_PLACE |= {"numpy"}  # which shares the memory
AUTOCAST_ON_CPU |= {f: "write" for f in functions(_IN_PLACE) if f not in AUTOCAST_ON_CPU}
_data: Any = torch.Tensor.data
AUTOCAST_ON_CPU[_data.__set__] = "write"
MIXED_FUNCTIONS: dict[Function, Mixed] = {
    function: mixed
    for mixed, names in MIXED.items()
    for function in functions(names)
    # F.batch_norm, whose argument order differs, calls torch.batch_norm
    if mixed != "statistics" or not isinstance(function, FunctionType)
}

# --- casts of weights that autocast keeps --------------------------------------------------------
#
# torch uses its cast of a weight until the outermost context ends, whatever is written into the
# weight meanwhile. Here casts go before a written weight is used. On a CPU the mode sees products
# and writes; elsewhere there is none, and a call of the model looks at its weights. ``p.data`` has
# a version of its own: writes through it are known by their memory alone, and not without a mode.

# by id of what may have a cast: itself (inputs weakly), as another may get its id, and its version
# and address
_SEEN: dict[int, tuple[Tensor | weakref.ref[Tensor], tuple[int, int]]] = {}
_PLAIN = (Tensor, nn.Parameter)  # of other classes, as fakes, addresses are not to be asked
_MEMORY: set[int] = set()  # where the memory of the parameters among these begins
_with_gradients = [True]  # in the last call of a model


def drop_casts() -> None:
    """Drop all casts, which torch keeps for the whole process."""
    torch.clear_autocast_cache()
    _SEEN.clear()
    _MEMORY.clear()


def before_use(values: Iterable[Any]) -> None:
    """Drop the casts if one of these was written since it was used; only weights have casts."""
    if torch.compiler.is_compiling():
        return  # a graph casts weights whenever it runs
    for value in values:
        if isinstance(value, list | tuple):
            before_use(value)
        elif type(value) in _PLAIN and value.requires_grad and value.is_leaf:
            try:
                now, seen = (value._version, value.data_ptr()), _SEEN.get(id(value))
                if seen is not None and seen[0] is value and seen[1] == now:
                    continue
                weight = type(value) is nn.Parameter
                whose = seen and (seen[0]() if isinstance(seen[0], weakref.ref) else seen[0])
                if seen is not None and whose is value and seen[1] != now:
                    drop_casts()
                _SEEN[id(value)] = value if weight else weakref.ref(value), now
                if weight:
                    _MEMORY.add(value.untyped_storage().data_ptr())
            except RuntimeError:  # it has no memory, as in torch.func
                continue


def before_write(values: Iterable[Any]) -> None:
    """Drop the casts if a function is about to write a weight, or memory that is a weight's."""
    if not _SEEN or torch.compiler.is_compiling():
        return
    for value in values:
        if isinstance(value, list | tuple):
            before_write(value)
        elif isinstance(value, Tensor) and value.is_leaf:  # what has a graph shares no memory
            with suppress(RuntimeError):  # of what has no memory, as in torch.func
                plain = type(value) in _PLAIN
                if value.untyped_storage().data_ptr() in _MEMORY if plain else value.requires_grad:
                    drop_casts()


def before_forward(weights: Iterable[Tensor], *_: object) -> None:
    """Drop the casts if these were written, or gradients turned on or off, as to evaluate."""
    if not torch.compiler.is_compiling():
        if _with_gradients[0] != torch.is_grad_enabled():
            _with_gradients[0] = torch.is_grad_enabled()
            drop_casts()
        before_use(weights)
