"""The parts of a GPT block, plain torch, right in fp32, under autocast and in all-16-bit alike.

None of them knows which: a 16-bit parameter makes a 16-bit result, autocast turns the operands of
matmuls and attention to 16 bits and leaves the residual stream as it is, and what must be fp32 is
fp32 by its own doing: LayerNorm's statistics (here) and attention's softmax (inside SDPA, whose
kernels all keep it in fp32).

Shapes: B batch, T positions, C width, H heads, D width of a head (C = H D), S positions of the
keys (T, or more with a cache).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.models.gpt_config import GPTConfig
from halfstep.models.islands import autocast_off
from halfstep.models.vocabulary import Vocabulary


class LayerNorm(nn.LayerNorm):
    """LayerNorm with fp32 statistics and the dtype of its input, on every device, autocast or not.

    CUDA's kernel keeps mean, 1/std and the sums of gain and bias gradients in fp32 for 16-bit
    inputs, so no widened copy is made. CPU's kernel does not: its sums of 16-bit gradients stop
    growing at 256 (bf16) or 2048 (fp16) per thread, so there the input is widened. Autocast is off,
    for CUDA's would answer a 16-bit input in fp32 and CPU's would not. If the parameters are wider
    than the input (a policy that keeps norms in fp32), both are widened: CUDA wants one dtype.

    **Source:** CPU measured with torch 2.13, ``tests/models/test_layers.py`` pins it; CUDA from
    ``aten/src/ATen/native/cuda/layer_norm_kernel.cu`` (``T_ACC``), certified by a ``gpu`` test.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises the last dim of ``input``, ``(..., C)``; the result has its shape and dtype.

        **Source:** Ba et al. 2016, "Layer Normalization", eq. 4.
        """
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        if input.device.type != "cuda":
            dtype = torch.promote_types(dtype, torch.float32)
        with autocast_off(input.device.type):
            output = F.layer_norm(
                input.to(dtype),
                self.normalized_shape,
                self.weight.to(dtype),
                self.bias.to(dtype),
                self.eps,
            )
        return output.to(input.dtype)


class Embedding(nn.Embedding):
    """An embedding whose gradient is summed over equal tokens in fp32 and then rounded, once.

    torch sums it in the dtype of the table: on CPU in bf16, the gradient of a token that occurs
    10000 times stops at 256 times its share. A widened table makes autograd sum in fp32.

    **Source:** measured with torch 2.13; ``tests/models/test_layers.py`` pins it.
    """

    vocabulary: Vocabulary
    """Where the rows are, if a head uses the table too, and only then: a model sets it, tensor
    parallelism replaces it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the table: ``(...)`` int64 to ``(..., C)`` in the dtype of the table, exact."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return F.embedding(input, self.weight.to(wide)).to(self.weight.dtype)


class KeyValueCache:
    """Keys and values of the positions one block has seen: generation need not repeat them."""

    def __init__(self) -> None:
        self._keys_BHSD: torch.Tensor | None = None
        self._values_BHSD: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of positions held."""
        return 0 if self._keys_BHSD is None else self._keys_BHSD.shape[2]

    def extend(
        self, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new positions and returns all, ``(B, H, S, D)`` each."""
        if self._keys_BHSD is not None and self._values_BHSD is not None:
            k_BHTD = torch.cat((self._keys_BHSD, k_BHTD), dim=2)
            v_BHTD = torch.cat((self._values_BHSD, v_BHTD), dim=2)
        self._keys_BHSD, self._values_BHSD = k_BHTD, v_BHTD
        return k_BHTD, v_BHTD


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before.

    The rows of ``qkv`` are ordered (head, q|k|v, D), not (q|k|v, head, D) as GPT-2's files: a split
    of its output over tensor-parallel ranks then gives each rank whole heads, and the code below
    works on as many heads as it finds.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x_BTC: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Mixes positions; ``(B, T, C)`` in and out.

        With a non-empty cache ``x_BTC`` holds exactly one new position.

        **Source:** Vaswani et al. 2017, eq. 1: softmax(q k^T / sqrt(D)) v.
        """
        # unflatten finds the heads by itself: all of them, or this tensor-parallel rank's.
        qkv_BTH3D = self.qkv(x_BTC).unflatten(-1, (-1, 3, self.head_dim))
        q_BHTD, k_BHSD, v_BHSD = qkv_BTH3D.transpose(1, 2).unbind(dim=3)
        is_causal = True
        if cache is not None:
            # One new position may see everything in the cache, and causal masks align top left.
            is_causal = cache.length == 0
            assert is_causal or q_BHTD.shape[2] == 1, "a filled cache takes one position at a time"
            k_BHSD, v_BHSD = cache.extend(k_BHSD, v_BHSD)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHSD,
            v_BHSD,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
        )
        y_BTC: torch.Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


class MLP(nn.Module):
    """Two linear layers, 4 C wide between them, with tanh-approximated GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Transforms each position by itself; ``(B, T, C)`` in and out.

        **Source:** Hendrycks & Gimpel 2016, "Gaussian Error Linear Units", tanh form, as in GPT-2.
        """
        y_BTC: torch.Tensor = self.down(F.gelu(self.up(x_BTC), approximate="tanh"))
        return y_BTC


class Block(nn.Module):
    """One pre-LN transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.attn = CausalSelfAttention(config)
        self.mlp_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_checkpointing = config.activation_checkpointing

    def forward(self, x_BTC: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """The residual stream after this block; ``(B, T, C)`` in and out, dtype unchanged."""
        # Checkpointing is inside the block, so that hooks on the block (FSDP's) lie outside of it.
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            y_BTC: torch.Tensor = checkpoint(self._compute, x_BTC, use_reentrant=False)
            return y_BTC
        return self._compute(x_BTC, cache)

    def _compute(self, x_BTC: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        x_BTC = x_BTC + self.dropout(self.attn(self.attn_norm(x_BTC), cache))
        y_BTC: torch.Tensor = x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))
        return y_BTC
