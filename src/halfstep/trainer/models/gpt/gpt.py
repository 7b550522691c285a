"""GPT-2 in plain torch: learned positions, pre-LN blocks, a head tied to the token embedding.

Shapes: B batch, T positions, C width, V vocabulary, N = B T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import ConfigError, DataError
from halfstep.kernels.library import may_run
from halfstep.kernels.rows import gradient_dtype, norm
from halfstep.trainer.models.cross_entropy import (
    WHOLE,
    Vocabulary,
    autocast_off,
    linear_cross_entropy_sum,
    matmul_dtype,
)
from halfstep.trainer.models.gpt.fused_block import Weights, fused_block, layers_of
from halfstep.trainer.models.language_model import Cache, LanguageModel
from halfstep.trainer.models.shapes import GPTConfig

__all__ = ["GPT", "GPTConfig"]


class GPT(LanguageModel):
    """The GPT-2 network; the same code in fp32, under autocast, and with all parameters in 16 bits.

    Weights are drawn on the CPU from ``seed`` alone, so they are the same on every device and the
    global random state is left as it was. Under ``with torch.device("meta")`` nothing is drawn:
    call ``to_empty`` and :meth:`init_weights_` later.

    **Source:** Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        """Build the model on torch's default device, or the one of a ``torch.device`` context.

        Args:
            config: Shape of the network.
            seed: Random seed of the weights.

        Raises:
            ConfigError: If ``vocab_size`` has not been filled in yet.
        """
        if not config.vocab_size:
            raise ConfigError("model.vocab_size is 0: fill in the tokenizer's vocabulary size")
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.wte = Embedding(config.vocab_size, config.n_embd)
            self.wte.vocabulary = WHOLE  # set because the head uses this table too
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
        back into the residual stream; biases are 0 and norm gains 1. Values are drawn in fp32 on
        the generator's device and rounded to the parameter's dtype.

        Args:
            generator: A CPU generator gives the same weights on every device.

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
                drawn = torch.randn(
                    parameter.shape,
                    generator=generator,
                    dtype=torch.float32,
                    device=generator.device,
                )
                parameter.copy_(drawn.mul_(std))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the next token at every position.

        Args:
            tokens_BT: Token ids, ``(B, T)`` int64, ``T <= block_size``.

        Returns:
            ``(B, T, V)`` fp32: the matmul runs in the compute dtype, then its result is widened.

        Raises:
            DataError: If ``T`` exceeds ``block_size``, or (CPU) a token is out of range.
        """
        return self._head(self.hidden(tokens_BT))

    def loss_sum(
        self, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the losses as :meth:`LanguageModel.loss_sum`, without ever holding all logits.

        Raises:
            DataError: As :meth:`forward`, or (CPU) a target is out of range.
        """
        tokens_BT, targets_BT = batch
        x_NC = self.hidden(tokens_BT).flatten(0, 1)
        return linear_cross_entropy_sum(
            x_NC, self.wte.weight, targets_BT.flatten(), vocabulary=self.wte.vocabulary
        )

    def last_logits(self, tokens_BT: torch.Tensor, caches: Sequence[Cache] = ()) -> torch.Tensor:
        """Compute the last position's logits as :meth:`LanguageModel.last_logits`.

        Raises:
            DataError: As :meth:`forward`, counting the cached positions.
        """
        return self._head(self.hidden(tokens_BT, caches)[:, -1])

    def new_caches(self) -> Sequence[Cache]:
        """Make an empty cache for the keys and values of each block."""
        return [KeyValueCache() for _ in self.layers]

    def hidden(self, tokens_BT: torch.Tensor, caches: Sequence[Cache] = ()) -> torch.Tensor:
        """Compute the final, normalised hidden states ``(B, T, C)``, in the stream's dtype."""
        past = caches[0].length if caches else 0
        end = past + tokens_BT.shape[1]
        if end > self.config.block_size:
            raise DataError(
                f"the sequence has {end} tokens, but the model has {self.config.block_size} "
                "positions: shorten the sequence or raise model.block_size"
            )
        positions_T = torch.arange(past, end, device=tokens_BT.device)
        x_BTC = self.dropout(self._embed(tokens_BT) + self.wpe(positions_T))
        for i, block in enumerate(self.layers):
            x_BTC = block(x_BTC, caches[i] if caches else None)
        normed_BTC: torch.Tensor = self.final_norm(x_BTC)
        return normed_BTC

    def _embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Embed the tokens; turn torch's bare IndexError (CPU) into one that shows the range."""
        try:
            embedded_BTC: torch.Tensor = self.wte(tokens_BT)
        except IndexError as error:
            low, high = (int(t) for t in torch.aminmax(tokens_BT))
            raise DataError(
                f"tokens run from {low} to {high}, but the model knows 0 to "
                f"{self.config.vocab_size - 1}: check the tokenizer against model.vocab_size"
            ) from error
        return embedded_BTC

    def _head(self, x_C: torch.Tensor) -> torch.Tensor:
        """Compute fp32 logits of hidden states ``(..., C)`` by the same matmul as the loss head."""
        vocabulary = self.wte.vocabulary
        x_C, weight_VC = vocabulary.share(x_C), vocabulary.local(self.wte.weight)
        dtype = matmul_dtype(x_C, weight_VC)
        with autocast_off(x_C.device.type):
            logits_V = F.linear(x_C.to(dtype), weight_VC.to(dtype))
        wide = torch.promote_types(dtype, torch.float32)  # fp64 stays fp64
        return vocabulary.gather(logits_V.to(wide))

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks in order."""
        return list(self.layers)

    def tp_plan(self) -> dict[str, str]:
        """Return how tensor parallelism places each module that owns parameters, by module name.

        ``colwise`` splits a linear layer's outputs; ``rowwise`` splits its inputs, so results are
        summed. ``colwise:U`` keeps U outputs together: here the query, key and value of a head, so
        that the number of ranks must divide ``n_head``. ``replicate`` keeps all on every rank.
        ``vocab`` splits an embedding over its tokens, and with it the head, as ``wte`` is both.

        **Source:** Shoeybi et al. 2019, "Megatron-LM", §3.
        """
        head = 3 * self.config.n_embd // self.config.n_head
        plan = {"wte": "vocab", "wpe": "replicate"}
        for i in range(self.config.n_layer):
            plan[f"layers.{i}.attn_norm"] = "replicate"
            plan[f"layers.{i}.attn.qkv"] = f"colwise:{head}"
            plan[f"layers.{i}.attn.proj"] = "rowwise"
            plan[f"layers.{i}.mlp_norm"] = "replicate"
            plan[f"layers.{i}.mlp.up"] = "colwise"
            plan[f"layers.{i}.mlp.down"] = "rowwise"
        plan["final_norm"] = "replicate"
        return plan

    def require_shares(self, ranks: int) -> None:
        """Raise ConfigError if the heads cannot be shared equally by this number of ranks."""
        if self.config.n_head % ranks:
            raise ConfigError(
                f"model.n_head={self.config.n_head} attention heads cannot be shared equally by "
                f"tensor={ranks} ranks; choose a tensor size that divides them"
            )

    def flops_per_token(self, block_size: int) -> int:
        """Count the operations of forward and backward per token: 6 N + 12 n_layer n_embd T.

        Args:
            block_size: T, the sequence length in tokens.

        N counts all parameters except position embeddings; the tied table counts because the head
        multiplies by it. As is usual for model FLOPs utilisation, attention is counted in full, as
        if it were not causal, and recomputation by activation checkpointing is not counted.

        **Source:** Chowdhery et al. 2022, "PaLM", appendix B: 6 N + 12 L H Q T with H Q = n_embd.
        """
        n = self.num_parameters() - self.wpe.weight.numel()
        return 6 * n + 12 * self.config.n_layer * self.config.n_embd * block_size


# The parts of a GPT block in plain torch, correct in fp32, under autocast and in all-16-bit alike.
#
# None of them knows its mode. 16-bit parameters give 16-bit results; autocast casts the operands of
# matmuls and attention to 16 bits and leaves the residual stream as it is. What must be fp32 makes
# itself fp32: LayerNorm's statistics (here) and attention's softmax (inside SDPA, whose kernels all
# keep it in fp32).
#
# Shapes: B batch, T positions, C width, H heads, D width of a head (C = H D), S positions of the
# keys (T, or more with a cache).


class LayerNorm(nn.LayerNorm):
    """LayerNorm with fp32 statistics and the dtype of its input, on every device, autocast or not.

    CUDA's kernel keeps mean, 1/std and the sums of gain and bias gradients in fp32 for 16-bit
    inputs, so no widened copy is made. CPU's kernel does not: its sums of 16-bit gradients stop
    growing at 256 (bf16) or 2048 (fp16) per thread, so there the input is widened, or our own
    kernel runs. Autocast is off because CUDA's would return fp32 for a 16-bit input and CPU's would
    not. If the parameters are wider than the input (a policy that keeps norms in fp32), both are
    widened: CUDA's kernel requires one dtype.

    Before a matmul, ``feeds_matmul`` gives the dtype in which that one runs under autocast: what it
    would round to in any case, without a copy.

    **Source:** CPU measured with torch 2.13, ``test_layers.py`` pins it; CUDA from
    ``aten/src/ATen/native/cuda/layer_norm_kernel.cu`` (``T_ACC``), certified by a ``gpu`` test.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, feeds_matmul: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.feeds_matmul = feeds_matmul

    def forward(self, input: torch.Tensor) -> torch.Tensor:
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
        with autocast_off(input.device.type):
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

    vocabulary: Vocabulary
    """Says which ranks hold the rows. Present only where a head uses the table too: the model sets
    it, and tensor parallelism replaces it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up rows, ``(...)`` int64 to ``(..., C)`` in the dtype of the table, exactly."""
        if torch.compiler.is_compiling():  # compiled, the widened copy is never written
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            return F.embedding(input, self.weight.to(wide)).to(self.weight.dtype)
        rows: torch.Tensor = _Lookup.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _Lookup(torch.autograd.Function):
    """Rows of a table; the table's gradient is a sum in fp32."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, table_VC: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = len(table_VC), gradient_dtype(table_VC)
        return F.embedding(tokens, table_VC)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (tokens,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total_VC = torch.ops.aten.embedding_dense_backward(
            grad.to(wide), tokens, ctx.rows, -1, False
        )
        return None, total_VC.to(ctx.dtype)


class KeyValueCache:
    """Keys and values of the positions that a block has seen, so that generation reuses them."""

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
        """Append new positions; return all keys and all values, ``(B, H, S, D)`` each."""
        if self._keys_BHSD is not None and self._values_BHSD is not None:
            k_BHTD = torch.cat((self._keys_BHSD, k_BHTD), dim=2)
            v_BHTD = torch.cat((self._values_BHSD, v_BHTD), dim=2)
        self._keys_BHSD, self._values_BHSD = k_BHTD, v_BHTD
        return k_BHTD, v_BHTD


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

    def forward(self, x_BTC: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Mix positions by attention; ``(B, T, C)`` in and out.

        With a non-empty cache ``x_BTC`` holds exactly one new position.

        **Source:** Vaswani et al. 2017, eq. 1: softmax(q k^T / sqrt(D)) v.
        """
        # unflatten infers the number of heads: all of them, or this tensor-parallel rank's.
        qkv_BTH3D = self.qkv(x_BTC).unflatten(-1, (-1, 3, self.head_dim))
        q_BHTD, k_BHSD, v_BHSD = qkv_BTH3D.transpose(1, 2).unbind(dim=3)
        is_causal = True
        if cache is not None:
            # One new position may see the whole cache. SDPA's causal mask is aligned at the top
            # left, so it would let that position see the first key only.
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
    """Two linear layers, 4 C wide between them, with a tanh-approximated GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself; ``(B, T, C)`` in and out.

        **Source:** Hendrycks & Gimpel 2016, "Gaussian Error Linear Units", tanh form, as in GPT-2.
        """
        y_BTC: torch.Tensor = self.down(F.gelu(self.up(x_BTC), approximate="tanh"))
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

    def forward(self, x_BTC: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Return the residual stream after this block; ``(B, T, C)`` in and out, same dtype."""
        # Checkpoint inside the block, so that hooks on the block (FSDP's) do not run again.
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            y_BTC: torch.Tensor = checkpoint(self._compute, x_BTC, use_reentrant=False)
            return y_BTC
        return self._compute(x_BTC, cache)

    def _compute(self, x_BTC: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        layers = self._fusable(x_BTC) if cache is None else None
        if layers is not None:
            return fused_block(x_BTC, layers, self.attn.head_dim, self.attn_norm.eps)
        x_BTC = x_BTC + self.dropout(self.attn(self.attn_norm(x_BTC), cache))
        y_BTC: torch.Tensor = x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))
        return y_BTC

    def _fusable(self, x_BTC: torch.Tensor) -> Weights | None:
        """The layers for one pass by the compiled kernels; None where that does not apply."""
        known = x_BTC.device.type == "cpu" and x_BTC.dtype in (torch.bfloat16, torch.float32)
        layers = layers_of(self, _AS_BUILT) if known and may_run() else None
        if layers is None or matmul_dtype(x_BTC, layers.qkv) != torch.bfloat16:
            return None
        attn = self.attn
        drops = (self.training and self.dropout.p > 0) or (attn.training and attn.dropout > 0)
        if drops or attn.head_dim % 16 or attn.head_dim > 256:
            return None
        return layers if self.attn_norm.eps == self.mlp_norm.eps else None


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
"""The modules that a block's one pass takes the place of."""
