"""The parts of a text encoder: dropout by key, bags of n-grams, attention both ways, pooling.

As in ``layers.py`` no part knows the precision: a 16-bit parameter makes a 16-bit result, autocast
casts operands of matmuls and attention, and what must be fp32 is so by its own doing.

Shapes: B texts, T positions, C width, H heads, D width of a head (C = H D), L classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.models.encoder_config import EncoderConfig
from halfstep.models.islands import autocast_off
from halfstep.models.layers import MLP, Embedding, LayerNorm

NO_DROPOUT = -1
"""Key of a text from which nothing is dropped."""

_LOW_32 = 0xFFFFFFFF


def mix(x: torch.Tensor) -> torch.Tensor:
    """A number from 0 to 2^32 - 1 for each of ``x``, far from those of its neighbours.

    Args:
        x: int64, any shape; only its low 32 bits count.

    **Source:** the constants of Wellons, "Prospecting for Hash Functions" (2018), ``lowbias32``:
    every input bit changes every output bit with a probability near one half.
    """
    # Products of two 32-bit numbers wrap in int64, which leaves their low 32 bits right.
    x = x & _LOW_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the text's key and nothing else.

    A text keeps its mask whichever rank or micro-batch it is in, on every device, whatever was
    drawn before and when activations are computed again. In evaluation mode, and for texts with
    the key -1, nothing is dropped.

    Args:
        p: Probability of zeroing.
        site: Number of this place in the model; places with different numbers drop independently.
        positions: Zero whole positions. Otherwise features, each in all positions of its text.

    **Source:** features in all positions: Gal and Ghahramani, "A Theoretically Grounded Application
    of Dropout in Recurrent Neural Networks", NeurIPS 2016; masks by counter instead of state:
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """

    def __init__(self, p: float, site: int, *, positions: bool = False) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.positions = positions

    def forward(self, x_BTC: torch.Tensor, keys_B: torch.Tensor) -> torch.Tensor:
        """``x`` times 0 or 1 / (1 - p), rounded once to its dtype; ``(B, T, C)`` or ``(B, C)``."""
        if not self.training or self.p == 0.0:
            return x_BTC
        size = x_BTC.shape[1] if self.positions else x_BTC.shape[-1]
        wide = torch.promote_types(x_BTC.dtype, torch.float32)
        factor = self.factors(keys_B, size).to(wide)
        shape = [len(keys_B), *[1] * (x_BTC.dim() - 1)]
        shape[1 if self.positions else -1] = size
        return (x_BTC * factor.view(shape)).to(x_BTC.dtype)

    def factors(self, keys_B: torch.Tensor, size: int) -> torch.Tensor:
        """``(B, size)`` fp64: 0, 1 / (1 - p), or 1 in rows whose key is -1."""
        places = torch.arange(size, device=keys_B.device)
        streams_B = mix(mix(keys_B + 0x9E3779B9 * (self.site + 1)) ^ mix(keys_B >> 32))
        drawn = mix(streams_B.unsqueeze(1) + 0x9E3779B9 * places)
        kept = drawn >= int(self.p * 2**32)
        factor = kept.double() / (1.0 - self.p)
        return torch.where((keys_B == NO_DROPOUT).unsqueeze(1), 1.0, factor)

    def extra_repr(self) -> str:
        """The sizes that ``print(model)`` shows for this layer."""
        return f"p={self.p}, site={self.site}"


class NgramBag(nn.Module):
    """A linear model of which n-grams of tokens a text holds: one row of logits for each.

    Short texts with few examples are told apart by which words stand in them more than by how they
    go on. A linear model learns that without learning texts by heart, as each n-gram of a text
    moves the logits by itself, and little; the transformer learns what is left.

    Rows begin at 0 and are multiplied by ``ngram_scale``, which is how much faster than the rest
    they learn: AdamW's steps do not depend on the size of gradients.

    **Source:** Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016; hashing:
    Joulin et al., "Bag of Tricks for Efficient Text Classification", EACL 2017, section 2.1.
    """

    def __init__(self, config: EncoderConfig, order: int, site: int) -> None:
        super().__init__()
        self.order = order
        self.buckets = config.ngram_buckets
        self.scale = config.ngram_scale
        self.table = Embedding(config.ngram_buckets, len(config.labels))
        self.dropout = KeyedDropout(config.ngram_dropout, site, positions=True)

    def forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, keys_B: torch.Tensor
    ) -> torch.Tensor:
        """Sums over a text's n-grams by the root of their number, ``(B, L)`` fp32 (or fp64)."""
        rows_BTL = self.table(self.bucket(ids_BT))
        with autocast_off(rows_BTL.device.type):
            rows_BTL = rows_BTL.to(torch.promote_types(rows_BTL.dtype, torch.float32))
            rows_BTL = self.dropout(rows_BTL, keys_B)
            real_BT1 = mask_BT.unsqueeze(-1)
            sum_BL = (rows_BTL * real_BT1).sum(1) * self.scale
            logits_BL: torch.Tensor = sum_BL / real_BT1.sum(1).to(sum_BL.dtype).sqrt()
            return logits_BL

    def bucket(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The table's row for the n tokens that end at each position (0 before the text)."""
        length = ids_BT.shape[1]
        padded = F.pad(ids_BT, (self.order - 1, 0))
        code_BT = torch.full_like(ids_BT, self.order)
        for i in range(self.order):
            code_BT = mix(code_BT * 31 + padded[:, i : i + length])
        return code_BT % self.buckets


class SelfAttention(nn.Module):
    """Multi-head attention in which every position sees every real position of its text."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x_BTC: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Mixes positions; ``(B, T, C)`` in and out. Each row of the mask must have a True.

        **Source:** Vaswani et al. 2017, eq. 1: softmax(q k^T / sqrt(D)) v.
        """
        qkv_BTH3D = self.qkv(x_BTC).unflatten(-1, (-1, 3, self.head_dim))
        q_BHTD, k_BHTD, v_BHTD = qkv_BTH3D.transpose(1, 2).unbind(dim=3)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_BT[:, None, None, :]
        )
        y_BTC: torch.Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


class EncoderBlock(nn.Module):
    """One pre-LN transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: EncoderConfig, site: int) -> None:
        """Builds block number ``site``, with dropouts at ``2 site`` and ``2 site + 1``."""
        super().__init__()
        self.attn_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.attn = SelfAttention(config)
        self.attn_dropout = KeyedDropout(config.dropout, 2 * site)
        self.mlp_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.mlp = MLP(config.as_gpt())
        self.mlp_dropout = KeyedDropout(config.dropout, 2 * site + 1)

    def forward(
        self, x_BTC: torch.Tensor, mask_BT: torch.Tensor, keys_B: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream after this block; ``(B, T, C)`` in and out, dtype unchanged."""
        y_BTC = self.attn(self.attn_norm(x_BTC), mask_BT)
        x_BTC = x_BTC + self.attn_dropout(y_BTC, keys_B)
        y_BTC = self.mlp(self.mlp_norm(x_BTC))
        out_BTC: torch.Tensor = x_BTC + self.mlp_dropout(y_BTC, keys_B)
        return out_BTC


def pool(x_BTC: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean and maximum of each feature over the real positions of a text, in fp32 (or fp64).

    Args:
        x_BTC: ``(B, T, C)``, any floating dtype.
        mask_BT: ``(B, T)`` bool with a True in each row.

    Returns:
        ``(B, 2 C)``: means, then maxima.
    """
    with autocast_off(x_BTC.device.type):
        x_BTC = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        real_BT1 = mask_BT.unsqueeze(-1)
        mean_BC = (x_BTC * real_BT1).sum(1) / real_BT1.sum(1)
        max_BC = x_BTC.masked_fill(~real_BT1, float("-inf")).amax(1)
        return torch.cat((mean_BC, max_BC), dim=1)


class Head(nn.Linear):
    """A linear layer that is an fp32 island: few classes cost nothing, and logits keep 24 bits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(B, 2 C)`` to fp32 ``(B, L)`` (fp64 for fp64)."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        dtype = torch.promote_types(dtype, self.weight.dtype)
        with autocast_off(input.device.type):
            return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
