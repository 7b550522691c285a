"""Generation of text from a GPT.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import NonFiniteError
from halfstep.trainer.models.gpt import GPT


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
    # Drawn on the CPU, so that they are the same on every device.
    uniforms = torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed))
    device = next(model.parameters()).device
    tokens = list(tokens)
    model.eval()
    for uniform in uniforms.tolist():
        window = torch.tensor([tokens[-model.config.block_size :]], device=device)
        logits_V = require_finite_logits(model.last_logits(window))[0]
        tokens.append(
            sample(logits_V, uniform, temperature) if temperature else int(logits_V.argmax())
        )
        if tokens[-1] == stop_token:
            break
    return tokens


def sample(logits_V: Tensor, uniform: float, temperature: float) -> int:
    """Draw a token by inverting the cumulative distribution at ``uniform``, in ``[0, 1)``.

    Tokens are sorted most probable first (ties: lower id first), so that a smaller uniform number
    means a more probable token.
    """
    ranked_V, ids_V = logits_V.sort(descending=True, stable=True)
    # Subtract the largest logit first and keep the temperature a normal fp32 number, so that tiny
    # temperatures give 0 and -inf, never inf - inf or 0 / 0.
    gaps_V = ranked_V - ranked_V[0]
    p_V = torch.softmax(gaps_V / max(temperature, torch.finfo(torch.float32).tiny), dim=-1)
    cumulative_V = p_V.cumsum(dim=-1)
    # Rounding may lift the product to the total itself; take the last token with p > 0 then.
    rank = torch.searchsorted(cumulative_V, uniform * cumulative_V[-1:], right=True)
    return int(ids_V[rank.clamp(max=int((p_V > 0).sum()) - 1)])


def require_finite_logits(logits_BV: Tensor) -> Tensor:
    """Return the logits unchanged, or raise NonFiniteError, as one cannot sample from NaNs."""
    if not bool(torch.isfinite(logits_BV).all()):
        raise NonFiniteError(
            "the model's logits hold NaN or inf, so there is nothing to draw from: the weights are "
            "damaged, or the range of the compute dtype is too small for them",
            cause="forward",
        )
    return logits_BV
