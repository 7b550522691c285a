"""Muon: momentum, orthogonalized, for matrices; AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.optim.base import Call, LowPrecisionOptimizer, run_kernel
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.options import Storage, require_option
from halfstep.optim.rules import ADAMW, DIRECTED, MUON, SGD, Algorithm, averaging
from halfstep.optim.state import Batch, StepTask, dense, flat
from halfstep.precision.agreement import MARK
from halfstep.precision.casting.autocast import SimulatedProducts
from halfstep.precision.masters.local_part import (
    flattened,
    is_sharded,
    part_like,
    place_like,
    sharers,
    split_like,
    whole_of,
)
from halfstep.precision.policy.devices import cpu_has_bf16

Adjustment = Literal["original", "match_rms_adamw"]

# Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024,
# https://kellerjordan.github.io/posts/muon: the quintic whose slope at 0 is largest while it keeps
# (0, 1] within about (0.7, 1.2); torch.optim.Muon has the same numbers.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS, _EPS = 5, 1e-7  # and of the norm: torch.optim.Muon's defaults


def newton_schulz(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix near 1 by five steps of matrix products, in its dtype.

    With X scaled to a Frobenius norm of 1, each step is X <- a X + (b A + c A A) X, A = X X^T.

    Args:
        matrix: Of shape (rows, columns); bf16 in Muon.

    Returns:
        A new matrix of the same shape: U S V^T where the argument is U T V^T, with S mostly within
        0.7 and 1.2.

    **Source:** as ``COEFFICIENTS``; the operations, in this order, are torch.optim.Muon's.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller of X X^T and X^T X
    x = x / x.norm().clamp(min=_EPS)
    scalar = x.device.type == "cpu" and x.dtype is torch.bfloat16 and not cpu_has_bf16()
    # through fp32 where the CPU has no instructions for it
    with SimulatedProducts(x.dtype) if scalar else nullcontext():
        for _ in range(_STEPS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(LowPrecisionOptimizer):
    """Muon for matrices, and AdamW for the groups with ``use_muon=False``.

    :func:`muon_groups` makes the groups. Bytes per element of a matrix, besides 2 for a bf16
    weight: the remainder's 2 (``split``, ``kahan``), 1 (``split24``) or 0; momentum 4 (``fp32``),
    2 (``bf16``) or 1 (``8bit``).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> optimizer = Muon(muon_groups(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> [(group["name"], group["param_names"]) for group in optimizer.param_groups]
        [('matrices', ['0.weight']), ('no matrices', ['0.bias', '1.weight', '1.bias'])]

    **Source:** as ``COEFFICIENTS``, with the momentum, the weight decay and the learning rates of
    torch.optim.Muon; ``match_rms_adamw``: Liu et al., "Muon is Scalable for LLM Training", 2025.
    """

    algorithm = MUON

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: Adjustment | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **storage: Unpack[Storage],
    ) -> None:
        """Make the optimizer; all but the last have their names in torch.optim.Muon.

        Args:
            params: Groups, as of :func:`muon_groups`, or matrices.
            lr: As of :class:`AdamW`.
            weight_decay: As of :class:`AdamW`.
            momentum: Decay of the average of gradients.
            nesterov: Orthogonalize the average of momentum and gradient, not the momentum itself.
            adjust_lr_fn: ``"original"`` (or None): times the square root of rows / columns where
                there are more rows; ``"match_rms_adamw"``: times 0.2 and the square root of the
                larger, so that one learning rate suits matrices and AdamW.
            betas: AdamW's decay rates, in groups with ``use_muon=False``.
            eps: AdamW's, there.
            storage: As of :class:`AdamW`.
        """
        options = {
            **{"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov},
            **{"adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps, "use_muon": True},
        }
        super().__init__(params, options, **storage)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse what any optimizer here does, and matrices that Muon cannot update."""
        super().check_group(group)
        _check_options(group)

    def algorithm_of(self, group: Any) -> Algorithm:
        """Muon, or AdamW in groups with ``use_muon=False``."""
        return MUON if group["use_muon"] else ADAMW

    def _run(self, call: Call, plan: Plan) -> None:
        group = self.param_groups[call.number]
        if not group["use_muon"]:
            super()._run(call, plan)
            return
        for parameter, task, direction in self._directions(group, plan, call):
            factor = adjustment(group["adjust_lr_fn"], *whole_of(parameter).shape)
            # element-wise again, so one kernel stores it in any rounding mode
            gradient = flat(direction, dense(parameter))
            move = replace(task, moments=(), tops=(), gradient=gradient)
            moved = replace(plan, algorithm=DIRECTED, moments="fp32", multiplier=factor)
            run_kernel(Batch([move]), moved)

    def _directions(
        self, group: dict[str, Any], plan: Plan, call: Call
    ) -> Iterator[tuple[nn.Parameter, StepTask, Tensor]]:
        """Each matrix of a call, and this rank's part of its direction, in bf16.

        Of matrices that ranks share, each in turn is sent to another rank, and its direction back.
        """
        found: dict[Any, list[tuple[nn.Parameter, StepTask]]] = {}
        for parameter, task in zip(call.parameters, call.batch.tasks, strict=True):
            found.setdefault(sharers(whole_of(parameter)), []).append((parameter, task))
        for shared, members in found.items():
            size = shared[0].size() if shared else 1
            for at in range(0, len(members), size):
                some = members[at : at + size]
                parts = [self._averaged(group, plan, *member) for member in some]
                wholes = [whole_of(parameter) for parameter, _ in some]
                directions = _orthogonalized(parts, wholes, shared)
                yield from ((*member, d) for member, d in zip(some, directions, strict=True))

    def _averaged(
        self, group: dict[str, Any], plan: Plan, parameter: nn.Parameter, task: StepTask
    ) -> Tensor:
        """Average the gradient into the momentum: this rank's part of what is to orthogonalize."""
        layout = dense(parameter)
        momentum = torch.zeros_like(layout, dtype=torch.bfloat16)  # in the weight's memory order
        average = replace(
            plan,
            algorithm=SGD,
            constants=averaging(group["momentum"], nesterov=group["nesterov"]),
            update="nearest",
        )
        weight = momentum.as_strided((momentum.numel(),), (1,))
        run_kernel(Batch([replace(task, weight=weight, remainder=None)]), average)
        return momentum


def _orthogonalized(parts: list[Tensor], wholes: list[Tensor], shared: Any) -> list[Tensor]:
    """This rank's parts of the directions of matrices, one for each rank that shares them."""
    if shared is None:
        placed: Any = place_like(parts[0], wholes[0])
        matrix = placed.full_tensor() if is_sharded(placed) else placed
        return [part_like(newton_schulz(matrix), wholes[0])]
    (group, dim), pieces = shared, list[Tensor]()
    ranks, own = group.size(), group.rank()
    if own < len(parts):
        pieces += torch.empty(wholes[own].shape, device="meta").chunk(ranks, dim)
    sent = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    received = [piece.numel() for piece in pieces] + [0] * (ranks - len(pieces))
    own_parts = flattened(parts)
    matrix = own_parts.new_empty(sum(received))
    dist.all_to_all_single(matrix, own_parts, received, sent, group=group)
    if pieces:
        matrix = newton_schulz(torch.cat(split_like(matrix, pieces), dim))
        matrix = flattened(matrix.chunk(ranks, dim))
    directions = torch.empty_like(own_parts)
    dist.all_to_all_single(directions, matrix, sent, received, group=group)
    return split_like(directions, parts)


def adjustment(kind: Adjustment | None, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix of this shape; see :class:`Muon`."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _check_options(group: dict[str, Any]) -> None:
    kind, momentum = group["adjust_lr_fn"], group["momentum"]
    require_option(0 <= momentum < 1, "momentum value", momentum, "0 <= momentum < 1")
    allowed = get_args(Adjustment)
    require_option(kind in (None, *allowed), "adjust_lr_fn", kind, f"None, {', '.join(allowed)}")
    if not group["use_muon"]:
        return
    for at, parameter in enumerate(group["params"]):
        if parameter.dim() != 2:
            name = group.get("param_names", {at: f"parameter {at}"})[at]
            raise PrecisionError(
                f"Muon only supports 2D parameters, and {name} has shape {tuple(parameter.shape)}: "
                "make it with halfstep.optim.muon_groups(model), or give this one a group of its "
                "own with use_muon=False, which AdamW updates"
            )
        if getattr(parameter, MARK, False):
            raise PrecisionError(
                f"a parameter of shape {tuple(parameter.shape)} is marked {MARK}, and Muon needs "
                "whole tensors: update it by AdamW or Lion of halfstep.optim, or let every rank "
                "hold it whole"
            )


_HEADS = frozenset({"lm_head", "head", "classifier", "score"})


def _reason(name: str, parameter: nn.Parameter, tables: Sequence[nn.Module]) -> str:
    """Why a parameter belongs to Muon or to AdamW: by its table, its shape or its name."""
    path = name.split(".")
    embeddings: list[Tensor] = [table.get_parameter("weight") for table in tables]
    # of the words, not of positions, which may be as many as a hidden layer is wide
    head = max((weight.shape for weight in embeddings), default=None)
    if any(parameter is weight for weight in embeddings) or "embed" in ".".join(path[-2:]):
        return "embeddings" if parameter.dim() > 1 else "no matrices"
    if parameter.dim() != 2:
        return "no matrices"
    named_so = len(path) > 1 and path[-2] in _HEADS
    return "heads" if parameter.shape == head or named_so else "matrices"


def muon_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups for :class:`Muon`: hidden matrices, and by reason what AdamW updates.

    Each group says what it is (``name``) and which parameters it has (``param_names``):
    ``matrices`` for Muon; ``embeddings`` (of an ``nn.Embedding``, tied to one, or called so),
    ``heads`` (of the shape of the largest embedding, or called head, lm_head, classifier or
    score) and ``no matrices`` (norms, biases, convolutions), which do not decay, for AdamW. Frozen
    parameters are in none.

    Args:
        model: Any module.
        options: Options of AdamW's groups, such as ``lr`` and ``betas``.

    **Source:** Jordan, as above: hidden layers only; embeddings and heads are AdamW's.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        found.setdefault(_reason(name, parameter, tables), []).append((name, parameter))
    groups = []
    for reason in ("matrices", "embeddings", "heads", "no matrices"):
        if reason in found:
            group = {"params": found[reason], "name": reason, "use_muon": reason == "matrices"}
            own = {} if reason == "matrices" else options
            kept = {"weight_decay": 0.0} if reason == "no matrices" else {}
            groups.append(group | own | kept)
    return groups
