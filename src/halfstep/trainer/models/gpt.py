"""GPT-2 in plain torch: learned positions, pre-LN blocks, a head tied to the token embedding.

Shapes: B batch, T positions, C width, V vocabulary, N = B T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from halfstep.errors import DataError, NonFiniteError
from halfstep.kernels.attention import Settings, attend, attend_backward
from halfstep.kernels.rows import (
    add,
    add_and_normalise,
    gelu_of_rows,
    gelu_of_rows_backward_,
    gradient_dtype,
    norm,
    norm_gradients,
    normalised,
)
from halfstep.precision.casting.cast import OutsideCall, region_of
from halfstep.precision.casting.op_casts import is_plain, may_run
from halfstep.precision.loss_head import linear_cross_entropy, matmul_dtype
from halfstep.precision.masters.local_part import local_part, part_like
from halfstep.trainer.models import IGNORE_INDEX, GPTConfig


class GPT(nn.Module):
    """The GPT-2 network; the same code in fp32, under autocast, and with all parameters in 16 bits.

    Weights are drawn on the CPU from ``seed`` alone, so they are the same on every device and the
    global random state is left as it was. Under ``with torch.device("meta")`` nothing is drawn:
    call ``to_empty`` and :meth:`init_weights_` later.

    **Source:** Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        """Build the model on torch's default device, or the one of a ``torch.device`` context."""
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.wte = Embedding(config.vocab_size, config.n_embd)
            self.wpe = Embedding(config.block_size, config.n_embd)
            self.dropout = nn.Dropout(config.dropout)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.final_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights_(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights_(self, generator: torch.Generator) -> None:
        """Draw every parameter anew, in the order of ``named_parameters``.

        Weights are normal with standard deviation 0.02, or 0.02 / sqrt(2 n_layer) for projections
        back into the residual stream; biases are 0 and norm gains 1. Values are drawn in fp32, on
        the generator's device, and rounded to the parameter's dtype. Of a sharded parameter, too,
        all are drawn, and this rank's part is kept.

        **Source:** 0.02 is GPT-2's ``initializer_range``; the scaling is Radford et al. 2019, §2.3,
        1/sqrt(N) for N residual layers, of which a block has two.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = residual_std if name.endswith(("proj.weight", "down.weight")) else 0.02
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device=generator.device)
                drawn.normal_(generator=generator).mul_(std)
                local_part(parameter).copy_(part_like(drawn, parameter))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Compute the logits of the next token at every position of ``tokens_BT``, int64.

        Returns:
            ``(B, T, V)`` fp32: the matmul runs in the compute dtype, then its result is widened.

        Raises:
            DataError: If ``T`` exceeds ``block_size``.
        """
        return self._head(self.hidden(tokens_BT))

    def loss_sum(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the next-token losses over a batch, and their number.

        Args:
            batch: ``(tokens_BT, targets_BT)``, int64; a target of -100 is not counted.

        Returns:
            Loss sum in nats (fp32 scalar with gradient) and count (int64 scalar).
        """
        tokens_BT, targets_BT = batch
        x_NC = self.hidden(tokens_BT).flatten(0, 1)
        targets_N = targets_BT.flatten()
        loss = linear_cross_entropy(x_NC, self.wte.weight, targets_N, reduction="sum")
        return loss, (targets_N != IGNORE_INDEX).sum()

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Compute the final, normalised hidden states ``(B, T, C)``, in the stream's dtype."""
        length = tokens_BT.shape[1]
        if length > self.config.block_size:
            raise DataError(
                f"the sequence has {length} tokens, but the model has {self.config.block_size} "
                "positions: shorten the sequence or raise model.block_size"
            )
        positions_T = torch.arange(length, device=tokens_BT.device)
        x_BTC = self.dropout(self.wte(tokens_BT) + self.wpe(positions_T))
        for block in self.layers:
            x_BTC = block(x_BTC)
        normed_BTC: Tensor = self.final_norm(x_BTC)
        return normed_BTC

    def _head(self, x_C: Tensor) -> Tensor:
        """Compute fp32 logits of hidden states ``(..., C)`` by the same matmul as the loss head."""
        weight_VC = self.wte.weight
        dtype = matmul_dtype(x_C, weight_VC)
        wide = torch.promote_types(dtype, torch.float32)  # fp64 stays fp64
        return F.linear(x_C.to(dtype), weight_VC.to(dtype)).to(wide)

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks in order."""
        return list(self.layers)

    def tp_plan(self) -> dict[str, str]:
        """Return how tensor parallelism splits modules, by name; the others stay whole.

        ``colwise`` splits a linear layer's outputs; ``rowwise`` splits its inputs, so results are
        summed. ``colwise:U`` keeps U outputs together: here the query, key and value of a head, so
        that the number of ranks must divide ``n_head``.

        **Source:** Shoeybi et al. 2019, "Megatron-LM", §3.
        """
        head = 3 * self.config.n_embd // self.config.n_head
        plan = {}
        for i in range(self.config.n_layer):
            plan[f"layers.{i}.attn.qkv"] = f"colwise:{head}"
            plan[f"layers.{i}.attn.proj"] = "rowwise"
            plan[f"layers.{i}.mlp.up"] = "colwise"
            plan[f"layers.{i}.mlp.down"] = "rowwise"
        return plan


# The parts of a GPT block in plain torch, correct in fp32, under autocast and in all-16-bit alike.
#
# None of them knows its mode. 16-bit parameters give 16-bit results; autocast casts the operands of
# matmuls and attention to 16 bits and leaves the residual stream as it is. What must be fp32 makes
# itself fp32: LayerNorm's statistics (here) and attention's softmax (inside SDPA, whose kernels all
# keep it in fp32).
#
# Shapes: B batch, T positions, C width, H heads, D width of a head (C = H D).


class LayerNorm(nn.LayerNorm):
    """LayerNorm with fp32 statistics and the dtype of its input, on every device, autocast or not.

    CUDA's kernel keeps mean, 1/std and the sums of gain and bias gradients in fp32 for 16-bit
    inputs, so no widened copy is made. CPU's kernel does not: its sums of 16-bit gradients stop
    growing at 256 (bf16) or 2048 (fp16) per thread, so there the input is widened, or our own
    kernel runs. Where the parameters are wider than the input, both are widened: CUDA's kernel
    requires one dtype. Before a matmul, ``feeds_matmul`` gives the dtype in which that one runs
    under autocast: what it would round to in any case, without a copy.

    **Source:** CPU measured with torch 2.13, ``test_layers.py`` pins it; CUDA from
    ``aten/src/ATen/native/cuda/layer_norm_kernel.cu`` (``T_ACC``), certified by a ``gpu`` test.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, feeds_matmul: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.feeds_matmul = feeds_matmul

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dim of ``input``, ``(..., C)``; the result has its shape.

        **Source:** Ba et al. 2016, "Layer Normalization", eq. 4.
        """
        to = matmul_dtype(input, input) if self.feeds_matmul else input.dtype
        known = to == torch.bfloat16 and input.dtype in (torch.bfloat16, torch.float32)
        wide = input.shape[-1] >= 256  # below, the call costs more than the kernel saves
        if known and wide and input.device.type == "cpu" and may_run():
            return norm(input, self.weight, self.bias, self.eps, to)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        if input.device.type != "cuda":
            dtype = torch.promote_types(dtype, torch.float32)
        # Autocast leaves fp32 operands alone; to switch it off would keep the graph out of caches.
        output = F.layer_norm(
            input.to(dtype),
            self.normalized_shape,
            self.weight.to(dtype),
            self.bias.to(dtype),
            self.eps,
        )
        return output.to(to)


class Embedding(nn.Embedding):
    """An embedding whose gradient is summed over equal tokens in fp32, then rounded once.

    torch sums it in the table's dtype: on CPU in bf16, the gradient of a token that occurs 10000
    times stops growing at 256 times one occurrence. No widened copy of the table is made for it.

    **Source:** measured with torch 2.13; ``tests/trainer/models/test_layers.py`` pins it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Look up rows, ``(...)`` int64 to ``(..., C)`` in the dtype of the table, exactly."""
        if torch.compiler.is_compiling():  # compiled, the widened copy is never written
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            return F.embedding(input, self.weight.to(wide)).to(self.weight.dtype)
        rows: Tensor = _Lookup.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _Lookup(torch.autograd.Function):
    """Rows of a table; the table's gradient is a sum in fp32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table_VC: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = len(table_VC), gradient_dtype(table_VC)
        return F.embedding(tokens, table_VC)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total_VC = torch.ops.aten.embedding_dense_backward(
            grad.to(wide), tokens, ctx.rows, -1, False
        )
        return None, total_VC.to(ctx.dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each position sees itself and earlier positions.

    The rows of ``qkv`` are ordered (head, q|k|v, D), not (q|k|v, head, D) as in GPT-2's files: so a
    split of its output over tensor-parallel ranks gives each rank whole heads, and the code below
    works on as many heads as it finds.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix positions by attention; ``(B, T, C)`` in and out.

        **Source:** Vaswani et al. 2017, eq. 1: softmax(q k^T / sqrt(D)) v.
        """
        # unflatten infers the number of heads: all of them, or this tensor-parallel rank's.
        qkv_BTH3D = self.qkv(x_BTC).unflatten(-1, (-1, 3, self.head_dim))
        q_BHTD, k_BHTD, v_BHTD = qkv_BTH3D.transpose(1, 2).unbind(dim=3)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, None, self.dropout if self.training else 0.0, is_causal=True
        )
        y_BTC: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


class MLP(nn.Module):
    """Two linear layers, 4 C wide between them, with a tanh-approximated GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Transform each position by itself; ``(B, T, C)`` in and out.

        **Source:** Hendrycks & Gimpel 2016, "Gaussian Error Linear Units", tanh form, as in GPT-2.
        """
        y_BTC: Tensor = self.down(F.gelu(self.up(x_BTC), approximate="tanh"))
        return y_BTC


class Block(nn.Module):
    """One pre-LN transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        layer_norm = partial(LayerNorm, config.n_embd, eps=config.layer_norm_eps, feeds_matmul=True)
        self.attn_norm = layer_norm()
        self.attn = CausalSelfAttention(config)
        self.mlp_norm = layer_norm()
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_checkpointing = config.activation_checkpointing

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the residual stream after this block; ``(B, T, C)`` in and out, same dtype."""
        # Checkpoint inside the block, so that hooks on the block (FSDP's) do not run again.
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            y_BTC: Tensor = checkpoint(self._compute, x_BTC, use_reentrant=False)
            return y_BTC
        return self._compute(x_BTC)

    def _compute(self, x_BTC: Tensor) -> Tensor:
        weights = self._fusable(x_BTC)
        if weights is not None:
            sizes = self.attn.head_dim, self.attn_norm.eps
            fused_BTC: Tensor = _FusedBlock.apply(x_BTC, *sizes, *weights)  # type: ignore[no-untyped-call]
            return fused_BTC
        x_BTC = x_BTC + self.dropout(self.attn(self.attn_norm(x_BTC)))
        y_BTC: Tensor = x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))
        return y_BTC

    def _fusable(self, x_BTC: Tensor) -> _Weights | None:
        """The parameters for one pass by the compiled kernels; None where that does not apply."""
        known = x_BTC.device.type == "cpu" and x_BTC.dtype in (torch.bfloat16, torch.float32)
        weights = _unchanged(self) if known and may_run() else None
        if weights is None or matmul_dtype(x_BTC, weights.qkv) != torch.bfloat16:
            return None
        attn = self.attn
        drops = (self.training and self.dropout.p > 0) or (attn.training and attn.dropout > 0)
        if drops or attn.head_dim % 16 or attn.head_dim > 256:
            return None
        return weights if self.attn_norm.eps == self.mlp_norm.eps else None


# A whole block on a CPU in bf16, forward and backward, in one autograd function.
#
# Between its six matmuls the compiled kernels work, one pass over memory each: a bias is added
# where the result is read next, a residual sum and its LayerNorm are one pass, and the gradients of
# biases come out of passes that are made anyhow. What is cheap is computed again in backward
# instead of being kept: both LayerNorms' results and the GELU's.
#
# Shapes: N = B T tokens, C width, F = 4 C; H heads of D channels.


_AS_BUILT: Mapping[str, type[nn.Module]] = {
    "attn_norm": LayerNorm,
    "attn": CausalSelfAttention,
    "attn.qkv": nn.Linear,
    "attn.proj": nn.Linear,
    "mlp_norm": LayerNorm,
    "mlp": MLP,
    "mlp.up": nn.Linear,
    "mlp.down": nn.Linear,
}
"""The modules that a block's one pass takes the place of; the layers among them in the order of
:class:`_Weights`."""


class _Weights(NamedTuple):
    """The parameters of a block: weights ``(out, in)``, and vectors."""

    norm1: Tensor
    shift1: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    proj: Tensor
    proj_bias: Tensor
    norm2: Tensor
    shift2: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    def ready(self) -> _Weights:
        """Matrices (and the one bias that a matmul adds) in bf16, vectors in fp32."""
        low = [p.ndim == 2 or p is self.qkv_bias for p in self]
        return _Weights(
            *(
                p.to(torch.bfloat16 if is_low else torch.float32).contiguous()
                for p, is_low in zip(self, low, strict=True)
            )
        )


def _unchanged(block: nn.Module) -> _Weights | None:
    """The parameters of a block's six layers; None where somebody changed one.

    Changed are a module of another class (a subclass, too), one with hooks that are not passive
    (tensor parallelism, a user's, a watch's) or with a ``forward`` of its own (a user's, a rule's),
    and parameters of a subclass of tensors.
    """
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    found: list[Any] = []
    for name, expected in _AS_BUILT.items():
        m: Any = block.get_submodule(name)
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        passive = all(getattr(h, "passive", False) for some in hooks for h in some.values())
        region = region_of(m)  # with 16-bit weights, for a call outside of a context
        ours = type(region) is OutsideCall and region.module is m and region.replaced is None
        if type(m) is not expected or not (passive and (ours or "forward" not in m.__dict__)):
            return None
        if m._parameters:
            found += (m._parameters.get("weight"), m._parameters.get("bias"))
    return _Weights(*found) if all(map(is_plain, found)) else None


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        head_dim: int,
        epsilon: float,
        *parameters: Tensor,
    ) -> Tensor:
        w, batch = _Weights(*parameters).ready(), len(x_BTC)
        x = x_BTC.reshape(-1, x_BTC.shape[-1]).contiguous()
        h, _, _ = normalised(x, w.norm1, w.shift1, epsilon, torch.bfloat16, True)
        qkv = torch.addmm(w.qkv_bias, h, w.qkv.t())
        q, k, v = _heads(qkv, batch, head_dim)
        mixed, lse = attend(q, k, v, None, Settings(causal=True))
        added = torch.mm(_flat(mixed), w.proj.t())
        middle, h = add_and_normalise(x, added, w.proj_bias, w.norm2, w.shift2, epsilon)
        u = torch.mm(h, w.up.t())
        active = gelu_of_rows(u, w.up_bias)
        added = torch.mm(active, w.down.t())
        del active
        # shaped before, as FSDP2 wants a result that is no view
        y = add(middle.view(x_BTC.shape), added, w.down_bias)
        ctx.save_for_backward(x, qkv, mixed, lse, middle, u, *parameters, *w)
        ctx.shape, ctx.head_dim, ctx.epsilon = x_BTC.shape, head_dim, epsilon
        return y

    @staticmethod
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only so under create_graph=True
            raise NotImplementedError(
                "a GPT block by the compiled kernels has no second derivative: set "
                "HALFSTEP_KERNEL=torch in the environment for create_graph=True"
            )
        x, qkv, mixed, lse, middle, u, *rest = ctx.saved_tensors
        p, w = _Weights(*rest[: len(rest) // 2]), _Weights(*rest[len(rest) // 2 :])
        dy = grad_BTC.reshape(x.shape).contiguous()
        wanted = _Weights(*ctx.needs_input_grad[3:])

        dy_low = dy.to(torch.bfloat16)
        down = torch.mm(dy_low.t(), gelu_of_rows(u, w.up_bias)) if wanted.down else None
        down_bias = dy.sum(0, dtype=torch.float32)
        du = torch.mm(dy_low, w.down)
        up_bias = gelu_of_rows_backward_(du, u, w.up_bias)
        h, mean, inverse = normalised(middle, w.norm2, w.shift2, ctx.epsilon, torch.bfloat16, True)
        up, dh = torch.mm(du.t(), h) if wanted.up else None, torch.mm(du, w.up)
        d_middle, (norm2, shift2, proj_bias) = norm_gradients(
            middle, w.norm2, dh, mean, inverse, passed=dy
        )
        d_low = d_middle.to(torch.bfloat16)
        proj = torch.mm(d_low.t(), _flat(mixed)) if wanted.proj else None
        d_mixed = torch.mm(d_low, w.proj).view(mixed.transpose(1, 2).shape).transpose(1, 2)
        d_qkv, batch = torch.empty_like(qkv), len(mixed)
        q, k, v = _heads(qkv, batch, ctx.head_dim)
        into = _heads(d_qkv, batch, ctx.head_dim)
        attend_backward(into, d_mixed, q, k, v, None, mixed, lse, Settings(causal=True))
        h, mean, inverse = normalised(x, w.norm1, w.shift1, ctx.epsilon, torch.bfloat16, True)
        qkv_weight, dh = torch.mm(d_qkv.t(), h) if wanted.qkv else None, torch.mm(d_qkv, w.qkv)
        qkv_bias = d_qkv.sum(0, dtype=torch.float32)
        dx, (norm1, shift1, _) = norm_gradients(x, w.norm1, dh, mean, inverse, passed=d_middle)
        made = (
            norm1, shift1, qkv_weight, qkv_bias, proj, proj_bias, norm2, shift2, up, up_bias, down,
            down_bias,
        )  # fmt: skip
        grads = (
            g.to(gradient_dtype(q)) if g is not None and want else None
            for g, q, want in zip(made, p, wanted, strict=True)
        )
        return dx.view(ctx.shape), None, None, *grads


def _heads(qkv: Tensor, batch: int, head_dim: int) -> tuple[Tensor, ...]:
    """Query, key, value ``(B, H, T, D)`` inside ``(N, 3 C)``, whose columns are (H, q|k|v, D)."""
    return (
        qkv.view(batch, -1, qkv.shape[-1] // (3 * head_dim), 3, head_dim).transpose(1, 2).unbind(3)
    )


def _flat(mixed: Tensor) -> Tensor:
    """``(B, H, T, D)`` whose heads lie side by side as ``(N, C)``."""
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


# Generation of text. Shapes: B rows, V vocabulary.


@torch.no_grad()
def generate(
    model: GPT,
    tokens: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
) -> list[int]:
    """Return a prompt continued by up to ``max_new_tokens`` tokens; the same seed, the same text.

    Only the last ``block_size`` tokens are seen. ``temperature`` 0 takes the most probable token
    every time. Generation ends after ``stop_token``. The model is left in evaluation mode.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = list(tokens)
    model.eval()
    for _ in range(max_new_tokens):
        window = torch.tensor([tokens[-model.config.block_size :]], device=device)
        # drawn on the CPU, so that draws are the same on every device
        last_1V = model._head(model.hidden(window)[:, -1])
        logits_V = require_finite_logits(last_1V)[0].cpu()
        tokens.append(int(logits_V.argmax()))
        if temperature:
            gaps_V = (logits_V - logits_V.max()).double() / temperature
            tokens[-1] = int(gaps_V.softmax(dim=-1).multinomial(1, generator=generator))
        if tokens[-1] == stop_token:
            break
    return tokens


def require_finite_logits(logits_BV: Tensor) -> Tensor:
    """Return the logits unchanged, or raise NonFiniteError, as one cannot sample from NaNs."""
    if not bool(torch.isfinite(logits_BV).all()):
        raise NonFiniteError(
            "the model's logits hold NaN or inf, so there is nothing to draw from: the weights are "
            "damaged, or the range of the compute dtype is too small for them",
            cause="forward",
        )
    return logits_BV
