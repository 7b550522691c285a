"""Calibrates the first loss scale: the largest whose gradients are still finite.

A dynamic scale that starts at 2^16 finds its level by skipping batches. Here one batch, whose graph
exists already, is instead back-propagated a few times under different scales, into temporary
gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.scaling.gradients import Ranks
from halfstep.precision.scaling.loss_scale import LossScale


def largest_finite_scale(loss: Tensor, *, minimum: float = 1.0, maximum: float = 2.0**24) -> float:
    """The largest power of two S in [minimum, maximum] whose gradients of ``loss * S`` are finite.

    Algorithm: bisection over the exponent, with one backward pass per trial and
    ceil(log2(number of exponents)) trials (5 for the defaults)::

        low, high <- ceil(log2(minimum)), floor(log2(maximum)) + 1
        while high - low > 1:
            middle <- (low + high) // 2
            if d(loss * 2^middle)/d(every leaf) is finite: low <- middle
            else: high <- middle
        return 2^low

    Bisection is valid because overflow is monotonic: what overflows at S overflows at 2 S.

    No ``grad`` is touched, nothing is accumulated, no post-accumulate hook runs (so DDP reduces
    nothing), and the graph is kept for the real backward. ``Tensor.register_hook`` and full
    backward hooks of modules do run, once per trial, since they are part of the gradient.
    A trial needs memory for one more set of gradients. On a CPU that simulates fp16, call it
    inside the same context as the backward (:meth:`Autocast.arithmetic`).

    Args:
        loss: A finite scalar of any floating dtype that depends on at least one leaf tensor.
        minimum: The smallest scale allowed, above 0.
        maximum: The largest scale allowed.

    Returns:
        A power of two. If even the smallest one overflows, that one: a dynamic scale is then at
        its floor and reports it.

    Raises:
        PrecisionError: If the loss is not a finite scalar with a gradient, if there is no power of
            two between the bounds, or if the graph cannot be differentiated more than once.

    **Source:** the bounds are the floor and the ceiling of Apex's ``LossScaler`` (1 and 2^24).

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> loss = (weight.half() * 64).sum()  # its fp16 gradient is 64 S, finite below 65520
        >>> largest_finite_scale(loss)
        512.0
    """
    low, high = _exponents(minimum, maximum)
    _check_loss(loss)
    leaves = graph_leaves(loss)
    if not leaves:
        raise PrecisionError(
            "the loss depends on no leaf tensor that requires a gradient, so there is no gradient "
            "to calibrate the loss scale with; were the parameters frozen or the loss detached?"
        )
    high += 1  # the first exponent that is not allowed
    while high - low > 1:
        middle = (low + high) // 2
        if _is_finite_at(loss, 2.0**middle, leaves):
            low = middle
        else:
            high = middle
    return 2.0**low


def graph_leaves(loss: Tensor) -> list[Tensor]:
    """The leaf tensors that would get a gradient from a backward of ``loss``, each once."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    leaves: dict[Tensor, None] = {}
    seen, todo = {loss.grad_fn}, [loss.grad_fn]
    while todo:
        node = todo.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves[node.variable] = None  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return list(leaves)


def _exponents(minimum: float, maximum: float) -> tuple[int, int]:
    """The smallest and the largest allowed exponent."""
    if not (0 < minimum < math.inf and 0 < maximum < math.inf):
        raise PrecisionError(
            f"minimum={minimum!r}, maximum={maximum!r}; allowed: finite numbers above 0"
        )
    fraction, exponent = math.frexp(minimum)  # minimum = fraction * 2^exponent, 1/2 <= fraction < 1
    low = exponent - 1 if fraction == 0.5 else exponent
    high = math.frexp(maximum)[1] - 1
    if low > high or high > 126:
        raise PrecisionError(
            f"minimum={minimum:g}, maximum={maximum:g}; allowed: bounds with a power of two "
            "between them, at most 2^126"
        )
    return low, high


def _check_loss(loss: Tensor) -> None:
    if loss.numel() != 1 or not loss.requires_grad:
        raise PrecisionError(
            f"calibration got a loss of shape {tuple(loss.shape)} that "
            f"{'requires' if loss.requires_grad else 'does not require'} a gradient; allowed: a "
            "scalar computed from trainable parameters. Were they frozen or detached?"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise PrecisionError(
            f"the loss is {value} before any scaling, so no loss scale gives finite gradients; "
            "look at the forward pass and the data, or begin with a batch whose loss is finite"
        )


def _is_finite_at(loss: Tensor, scale: float, leaves: list[Tensor]) -> bool:
    try:
        gradients = torch.autograd.grad(
            loss.float() * scale, leaves, torch.ones_like(loss, dtype=torch.float32),
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
    except RuntimeError as error:
        if "heckpoint" not in str(error) or ".grad()" not in str(error):
            raise
        raise PrecisionError(
            "calibration cannot pass through torch.utils.checkpoint(use_reentrant=True); use "
            "use_reentrant=False, or give the first loss scale as a number"
        ) from error
    found = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
    return all(bool(values.isfinite().all()) for values in found)


def calibrate_(scale: LossScale, policy: PrecisionPolicy, loss: Tensor, ranks: Ranks) -> bool:
    """Start at the smallest of the scales that ranks find; False if a loss is not finite yet."""
    if any(ranks.worst([not bool(loss.isfinite())])):
        return False
    low, high = policy.loss_scale.min_scale, policy.loss_scale.max_scale
    found = largest_finite_scale(loss.reshape(()), minimum=low, maximum=high)
    scale.start_at(2.0 ** -ranks.worst([-round(math.log2(found))])[0])
    return True
