"""The base class of the networks of ``halfstep train``, and generation of text from one of them.

Shapes: B rows of the batch, T tokens, V vocabulary, R the same V tokens, most probable first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, NonFiniteError
from halfstep.trainer.models.shapes import GPTConfig


class Cache(Protocol):
    """What a part of a network keeps of the text so far, so that generation need not repeat it."""

    @property
    def length(self) -> int:
        """Number of positions held."""


class LanguageModel(nn.Module):
    """Base class of a family of networks for ``halfstep train``.

    A subclass is made as ``Family(config, seed=0)`` and has ``forward(tokens_BT)``, which returns
    the logits of the next token at every position, ``(B, T, V)`` fp32.
    """

    config: GPTConfig

    def loss_sum(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the next-token losses over a batch, and their number.

        Args:
            batch: ``(tokens_BT, targets_BT)``, int64; a target of -100 is not counted.

        Returns:
            Loss sum in nats (fp32 scalar with gradient) and count (int64 scalar).
        """
        raise NotImplementedError

    def blocks(self) -> list[nn.Module]:
        """Return the layers in order, to be sharded one by one; if empty, the network is one."""
        return []

    def last_logits(self, tokens_BT: Tensor, caches: Sequence[Cache] = ()) -> Tensor:
        """Compute the logits after the last position only, ``(B, V)`` fp32.

        Args:
            tokens_BT: ``(B, T)`` int64. With filled caches: the one position that follows them.
            caches: Caches from :meth:`new_caches`, which this call extends.
        """
        logits_BTV: Tensor = self(tokens_BT)
        return logits_BTV[:, -1]

    def new_caches(self) -> Sequence[Cache]:
        """Make empty caches for :meth:`last_logits`; without any, each token repeats the text."""
        return ()

    def require_shares(self, ranks: int) -> None:
        """Raise ConfigError for a number of ranks that cannot share each matrix product."""

    def num_parameters(self) -> int:
        """Count the parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, block_size: int) -> int:
        """Count the floating-point operations of forward and backward per token."""
        return 6 * self.num_parameters()


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens_BT: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token: int | None = None,
) -> Tensor:
    """Continue prompts by up to ``max_new_tokens`` tokens; the same seed gives the same text.

    Row ``b`` draws from a generator of its own, seeded ``seed + b``. The model's training mode is
    restored afterwards. Prompts ``(B, T)`` are of equal length; only the last ``block_size`` tokens
    are seen. ``temperature`` 0 takes the most probable token every time. A row that drew
    ``stop_token`` is padded with it; generation ends when all rows have. Returns ``(B, T + n)``.
    """
    check_drawing(max_new_tokens, temperature, top_k, top_p, seed)
    # Drawn on the CPU and all at once, so that they are the same on every device.
    generators = [torch.Generator().manual_seed(seed + b) for b in range(len(tokens_BT))]
    uniforms_NB = torch.stack([torch.rand(max_new_tokens, generator=g) for g in generators], dim=1)
    uniforms_NB = uniforms_NB.to(tokens_BT.device)
    stopped_B = torch.zeros_like(tokens_BT[:, 0], dtype=torch.bool)

    was_training = model.training
    model.eval()
    try:
        caches = model.new_caches()
        for uniforms_B in uniforms_NB:
            logits_BV, caches = _next_logits(model, tokens_BT, caches)
            if temperature == 0:
                next_B = logits_BV.argmax(dim=-1)
            else:
                next_B = sample(logits_BV, uniforms_B, temperature, top_k, top_p)
            if stop_token is not None:
                next_B = next_B.masked_fill(stopped_B, stop_token)
                stopped_B |= next_B == stop_token
            tokens_BT = torch.cat((tokens_BT, next_B.unsqueeze(1)), dim=1)
            if stop_token is not None and bool(stopped_B.all()):
                break
    finally:
        model.train(was_training)
    return tokens_BT


def _next_logits(
    model: LanguageModel, tokens_BT: Tensor, caches: Sequence[Cache]
) -> tuple[Tensor, Sequence[Cache]]:
    """Compute the logits after the last token, and the caches to pass to the next call.

    While the text fits the model, one new token costs one position of work. Once it does not, the
    window slides, every token moves to another position, and all cached keys are wrong: the window
    is then computed anew for every token.
    """
    seen = caches[0].length if caches else 0
    if tokens_BT.shape[1] > model.config.block_size:
        caches, seen = model.new_caches(), 0
    window_BT = tokens_BT[:, -model.config.block_size :][:, seen:]
    logits_BV = model.last_logits(window_BT, caches)
    return require_finite(logits_BV), caches


def sample(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution at ``uniforms_B``.

    Tokens are sorted most probable first (ties: lower id first), so that ``top_k`` and ``top_p``
    each keep a prefix, and a smaller uniform number means a more probable token.

    ``logits_BV`` are finite fp32, ``uniforms_B`` fp32 in ``[0, 1)``, ``temperature`` is positive,
    ``top_k`` and ``top_p`` are those of :func:`generate`. Returns ``(B,)`` int64 token ids.

    **Source:** top-p is Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", §3.1.
    """
    ranked_BR, ids_BR = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked_BR, ids_BR = ranked_BR[:, :top_k], ids_BR[:, :top_k]
    # Subtract the largest logit first and keep the temperature a normal fp32 number, so that tiny
    # temperatures give 0 and -inf, never inf - inf or 0 / 0.
    gaps_BR = ranked_BR - ranked_BR[:, :1]
    p_BR = torch.softmax(gaps_BR / max(temperature, torch.finfo(torch.float32).tiny), dim=-1)
    if top_p is not None:
        # Keep a token if those before it have not reached top_p yet; the first is always kept.
        p_BR = p_BR.masked_fill(p_BR.cumsum(dim=-1) - p_BR >= top_p, 0.0)
    cumulative_BR = p_BR.cumsum(dim=-1)
    # Rounding may lift the product to the total itself; take the last token with p > 0 then.
    target_B1 = uniforms_B.unsqueeze(1) * cumulative_BR[:, -1:]
    rank_B1 = torch.searchsorted(cumulative_BR, target_B1, right=True)
    rank_B1 = rank_B1.minimum((p_BR > 0).sum(dim=-1, keepdim=True) - 1)
    return ids_BR.gather(1, rank_B1).squeeze(1)


def check_drawing(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """Raise ConfigError naming the argument of :func:`generate` that is out of range, if any."""
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be in [0, 2**63), got {seed}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature must be finite and 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be 1 or more, or None for all tokens, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], or None for all tokens, got {top_p}")


def require_finite(logits_BV: Tensor) -> Tensor:
    """Return the logits unchanged, or raise NonFiniteError, as one cannot sample from NaNs."""
    if not bool(torch.isfinite(logits_BV).all()):
        raise NonFiniteError(
            "the model's logits hold NaN or inf, so there is nothing to draw from: the weights are "
            "damaged, or the range of the compute dtype is too small for them",
            cause="forward",
        )
    return logits_BV
