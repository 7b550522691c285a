"""A whole GPT block on a CPU in bf16, forward and backward, in one autograd function.

Between its six matmuls the compiled kernels work, one pass over memory each: a bias is added where
the result is read next, a residual sum and its LayerNorm are one pass, and the gradients of biases
come out of passes that are made anyhow. What is cheap is computed again in backward instead of
being kept: both LayerNorms' results and the GELU's.

Shapes: N = B T tokens, C width, F = 4 C; H heads of D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from halfstep.kernels.attention import Settings, attend, attend_backward
from halfstep.kernels.library import is_plain
from halfstep.kernels.rows import (
    add,
    add_and_normalise,
    gelu_of_rows,
    gelu_of_rows_backward_,
    gradient_dtype,
    norm_gradients,
    normalised,
)

_LOW = torch.bfloat16


class Weights(NamedTuple):
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

    def ready(self) -> Weights:
        """Matrices (and the one bias that a matmul adds) in bf16, vectors in fp32."""
        low = [p.ndim == 2 or p is self.qkv_bias for p in self]
        return Weights(
            *(
                p.to(_LOW if is_low else torch.float32).contiguous()
                for p, is_low in zip(self, low, strict=True)
            )
        )


def layers_of(block: nn.Module, classes: Mapping[str, type[nn.Module]]) -> Weights | None:
    """The parameters of a block's six layers; None where somebody changed one.

    Changed are a module of another class (a subclass, too), one with hooks (tensor parallelism,
    a user's, a watch's) or with a ``forward`` of its own, and parameters of a subclass
    of tensors.

    Args:
        block: The block.
        classes: The class of each of its modules, by name. The layers are the norms and
            ``nn.Linear``, in the order of :class:`Weights`; what is between must not be changed.
    """
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    layers = []
    for name, expected in classes.items():
        m: Any = block
        for part in name.split("."):
            m = m._modules.get(part)
            if m is None:
                return None
        if type(m) is not expected or "forward" in m.__dict__:
            return None
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        if any(hooks):
            return None
        if m._parameters:
            layers.append(m)
    if any(set(m._parameters) != {"weight", "bias"} for m in layers):
        return None
    found = [p for m in layers for p in (m._parameters["weight"], m._parameters["bias"])]
    if not all(map(is_plain, found)):
        return None
    return Weights(*found)  # type: ignore[arg-type]


def fused_block(x_BTC: Tensor, weights: Weights, head_dim: int, epsilon: float) -> Tensor:
    """The residual stream after a block without dropout, in its dtype (bf16 or fp32)."""
    y_BTC: Tensor = _Block.apply(x_BTC, head_dim, epsilon, *weights)  # type: ignore[no-untyped-call]
    return y_BTC


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        head_dim: int,
        epsilon: float,
        *parameters: Tensor,
    ) -> Tensor:
        w, batch = Weights(*parameters).ready(), len(x_BTC)
        x = x_BTC.reshape(-1, x_BTC.shape[-1]).contiguous()
        h, _, _ = normalised(x, w.norm1, w.shift1, epsilon, _LOW, True)
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
        p, w = Weights(*rest[: len(rest) // 2]), Weights(*rest[len(rest) // 2 :])
        dy = grad_BTC.reshape(x.shape).contiguous()
        wanted = Weights(*ctx.needs_input_grad[3:])

        dy_low = dy.to(_LOW)
        down = torch.mm(dy_low.t(), gelu_of_rows(u, w.up_bias)) if wanted.down else None
        down_bias = dy.sum(0, dtype=torch.float32)
        du = torch.mm(dy_low, w.down)
        up_bias = gelu_of_rows_backward_(du, u, w.up_bias)
        h, mean, inverse = normalised(middle, w.norm2, w.shift2, ctx.epsilon, _LOW, True)
        up, dh = torch.mm(du.t(), h) if wanted.up else None, torch.mm(du, w.up)
        d_middle, (norm2, shift2, proj_bias) = norm_gradients(
            middle, w.norm2, dh, mean, inverse, passed=dy
        )
        d_low = d_middle.to(_LOW)
        proj = torch.mm(d_low.t(), _flat(mixed)) if wanted.proj else None
        d_mixed = torch.mm(d_low, w.proj).view(mixed.transpose(1, 2).shape).transpose(1, 2)
        d_qkv, batch = torch.empty_like(qkv), len(mixed)
        q, k, v = _heads(qkv, batch, ctx.head_dim)
        into = _heads(d_qkv, batch, ctx.head_dim)
        attend_backward(into, d_mixed, q, k, v, None, mixed, lse, Settings(causal=True))
        h, mean, inverse = normalised(x, w.norm1, w.shift1, ctx.epsilon, _LOW, True)
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
