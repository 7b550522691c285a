"""Keeps the loss head's gradient matmuls inside the narrow range of fp16.

Shapes: R tokens of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import torch

from halfstep.models.vocabulary import Vocabulary


class NoScales:
    """The null object beside :class:`Fp16Scales`: fp32 and bf16 have range enough as they are."""

    def choose(self, log_pt_R1: torch.Tensor) -> None:
        """Takes note of the chunk's log-probabilities of the targets; here, does nothing."""

    def error(self, error_RV: torch.Tensor) -> torch.Tensor:
        """E, softmax minus one-hot, as the operand of both matmuls; may change it in place."""
        return error_RV

    def input(self, x_RD: torch.Tensor) -> torch.Tensor:
        """X as the operand of the weight gradient, in its own dtype."""
        return x_RD

    def unscale_x(self, grad_RD: torch.Tensor) -> torch.Tensor:
        """The true gradient of X from the matmul's, given in fp32; may change it in place."""
        return grad_RD

    def unscale_weight(self, grad_VD: torch.Tensor) -> torch.Tensor:
        """The true gradient of the weight from the matmul's, given in its own dtype."""
        return grad_VD


class Fp16Scales(NoScales):
    """Powers of two that keep both gradient matmuls of a chunk inside the range of fp16.

    The caller's loss scale is not known in forward, so each chunk brings scales of its own and
    takes them out again in fp32, which is exact. With E = softmax - onehot and miss_n = 1 - p_nt::

        s = power of two below 2^12 / (max_n miss_n * max(1, 2 max|W|))
        r = power of two below 2^15 / (sum_n miss_n * max|X|)
        E' = s E          dX = (E' W) / s
        X' = (r / s) X    dW = (E'^T X') / r

    Nothing overflows. A row of E holds -miss_n, and positive numbers that sum to miss_n, so
    |E'| <= 2^12 and |E' W| <= 2 s miss_n max|W| <= 2^12. A column of E adds up to no more than
    sum_n miss_n in absolute value, so |E'^T X'| <= 2^15. And little underflows: the scales follow
    the confidence of the model, so a chunk whose every p_nt is 0.9999 uses as many binades as one
    that guesses. Unscaled, E would lose all probabilities below 2^-25, and dW the rare tokens.

    **Source:** derived here. 2^15 is half of the largest fp16 number (65504), which leaves a factor
    of two for the rounding of the bounds themselves; 2^12 instead of 2^15 for s leaves X' three
    binades more, for sum_n miss_n may be R times max_n miss_n.
    """

    _SMALLEST = 2.0**-20
    """Floor for miss and max|X|: 0 must not divide, and less is fp32 rounding noise."""

    def __init__(self, x_ND: torch.Tensor, weight_VD: torch.Tensor, vocabulary: Vocabulary) -> None:
        """Measures both operands once for all chunks; the numbers stay on their device.

        Args:
            x_ND: The same on all ranks that hold parts of the vocabulary.
            weight_VD: The rows that are here.
            vocabulary: Makes the scales those of the whole table, so the same on all ranks.
        """
        self._x_max = _largest(x_ND).clamp_(min=self._SMALLEST)
        self._w_factor = (2 * vocabulary.largest(_largest(weight_VD))).clamp_(min=1)

    def choose(self, log_pt_R1: torch.Tensor) -> None:
        """Chooses s and r for one chunk from ``log_pt_R1 <= 0``, in nats, without a host sync."""
        miss_R1 = torch.expm1(log_pt_R1).neg_().clamp_(min=self._SMALLEST)
        self._s = _power_of_two_below(2.0**12 / (miss_R1.amax() * self._w_factor))
        self._r = _power_of_two_below(2.0**15 / (miss_R1.sum() * self._x_max))

    def error(self, error_RV: torch.Tensor) -> torch.Tensor:
        """E' = s E, in place, still fp32."""
        return error_RV.mul_(self._s)

    def input(self, x_RD: torch.Tensor) -> torch.Tensor:
        """X' = (r / s) X in fp16."""
        return (x_RD.float() * (self._r / self._s)).to(x_RD.dtype)

    def unscale_x(self, grad_RD: torch.Tensor) -> torch.Tensor:
        """DX = (E' W) / s in fp32, exact."""
        return grad_RD.div_(self._s)

    def unscale_weight(self, grad_VD: torch.Tensor) -> torch.Tensor:
        """DW = (E'^T X') / r in fp32, exact."""
        return grad_VD.float().div_(self._r)


def _largest(t: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of ``t`` as an fp32 scalar on its device; 0 if ``t`` is empty."""
    if t.numel() == 0:
        return torch.zeros((), device=t.device)
    low, high = torch.aminmax(t)
    return torch.maximum(low.abs(), high.abs()).float()


def _power_of_two_below(t: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above ``t > 0``; exact, as t = m 2^k with m in [0.5, 1)."""
    return t / (2 * torch.frexp(t).mantissa)
