"""What happens to finished gradients: their norm, whether they are finite, unscaling, clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.precision.result import Reason

# Elements that are widened at a time: 1 MiB of fp32.
_PIECE = 2**18


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Which parameters have gradients that are not finite, and in which way.

    Attributes:
        nan: Names of parameters with a NaN in the gradient.
        inf: Names of parameters with an infinity and no NaN.
    """

    nan: tuple[str, ...]
    inf: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, NaN first."""
        return self.nan + self.inf

    @property
    def reason(self) -> Reason | None:
        """Why a step with these gradients is skipped, or None if all are finite.

        An overflow can reach the parameters as NaN alone (inf - inf on its way through a backward
        pass), so NaN is first answered like an overflow; a bug survives down to the floor.
        """
        if not self.names:
            return None
        return "overflow" if self.inf else "nan_gradients"


def _values(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The stored values: for a sparse gradient its coalesced values, duplicates summed."""
    return [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, accumulated in fp32 whatever their dtype.

    Args:
        gradients: Any shapes; 16-bit, fp32 or sparse; on one device.

    Returns:
        fp32 scalar on that device, with no host synchronisation: NaN or inf if any element is not
        finite, or if the sum of squares overflows fp32 (see :func:`exact_global_norm`).
    """
    if not gradients:
        return torch.zeros(())
    values = _values(gradients)
    # torch's CPU norm of 16 bits in fp32 is 14 times slower than one of a widened copy.
    narrow = [v for v in values if v.element_size() == 2 and v.device.type == "cpu"]
    norms = [
        torch.linalg.vector_norm(part.float())
        for value in narrow
        for part in torch.split(value.reshape(-1), _PIECE)
    ]
    if len(narrow) < len(values):
        wide = [v for v in values if v.element_size() != 2 or v.device.type != "cpu"]
        norms.extend(torch._foreach_norm(wide, 2, dtype=torch.float32))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def exact_global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm in fp64, for finite gradients so large that their squares overflow fp32."""
    norms = [torch.linalg.vector_norm(value.double()) for value in _values(gradients)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def find_nonfinite(named_gradients: Iterable[tuple[str, Tensor]]) -> NonFinite:
    """Name the parameters whose gradients hold NaN or inf. Synchronises with the host."""
    nan: list[str] = []
    inf: list[str] = []
    for name, gradient in named_gradients:
        (value,) = _values([gradient])
        if not value.isfinite().all():
            (nan if value.isnan().any() else inf).append(name)
    return NonFinite(tuple(nan), tuple(inf))


def multiply_(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply every gradient by a number, in place; by exactly 1 costs nothing."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor, at most 1, that brings a global norm down to ``max_norm``.

    **Source:** Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
    2013, algorithm 1; the 1e-6 in the denominator as ``torch.nn.utils.clip_grad_norm_``.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
