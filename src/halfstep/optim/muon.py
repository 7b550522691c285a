"""Muon: momentum, orthogonalized, for matrices; AdamW for all other parameters."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.optim.base import LowPrecisionOptimizer, Members
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.moments import Moments
from halfstep.optim.options import checked_betas, require_option
from halfstep.optim.rules import ADAMW, DIRECTED, MUON, SGD, Algorithm, averaging
from halfstep.optim.state import StepTask, dense, flat
from halfstep.precision.agreement import MARK
from halfstep.precision.casting.simulate import SimulatedProducts
from halfstep.precision.masters.local_part import is_sharded, part_like, place_like, whole_of
from halfstep.precision.masters.rounding import Update
from halfstep.precision.policy.devices import cpu_has_bf16

Adjustment = Literal["original", "match_rms_adamw"]

# Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024,
# https://kellerjordan.github.io/posts/muon: the quintic whose slope at 0 is largest while it keeps
# (0, 1] within about (0.7, 1.2); torch.optim.Muon has the same numbers.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # of the norm, in torch.optim.Muon
_ADAMW_EPS = 1e-8
_MOST_STEPS = 100  # as torch.optim.Muon


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    eps: float = _EPS,
) -> Tensor:
    """Bring the singular values of a matrix near 1 by matrix products alone, in its own dtype.

    With X scaled to a Frobenius norm of 1, each step is X <- a X + (b A + c A A) X, A = X X^T.

    Args:
        matrix: Of shape (rows, columns); bf16 in Muon.
        steps: The number of steps.
        coefficients: a, b and c.
        eps: The least norm that the matrix is divided by.

    Returns:
        A new matrix of the same shape: U S V^T where the argument is U T V^T, with S mostly within
        0.7 and 1.2.

    **Source:** as ``COEFFICIENTS``; the operations, in this order, are torch.optim.Muon's.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller of X X^T and X^T X
    x = x / x.norm().clamp(min=eps)
    with _fast_products(x):
        for _ in range(steps):
            x = quintic(x, coefficients)
    return x.T if tall else x


def _fast_products(matrix: Tensor) -> AbstractContextManager[Any]:
    """Around products of a matrix: through fp32 where the CPU has no instructions for its dtype."""
    scalar = matrix.device.type == "cpu" and matrix.dtype is torch.bfloat16 and not cpu_has_bf16()
    return SimulatedProducts(matrix.dtype) if scalar else nullcontext()


def quintic(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """One step of :func:`newton_schulz`: a X + (b A + c A A) X, with A = X X^T."""
    a, b, c = coefficients
    gram = x @ x.T
    return torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


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
    on_direction: Callable[[Tensor, Tensor, float], None] | None = None
    """Called in a step with each matrix, the direction that it moves along, and its factor."""
    ranks: dist.ProcessGroup | None = None
    """The ranks that divide matrices among them, where all of them step together with the same
    gradients: each orthogonalizes its share and sends the directions to the others. To be set."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = _EPS,
        ns_steps: int = 5,
        adjust_lr_fn: Adjustment | None = None,
        *,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.95),
        update: Update | None = None,
        moments: Moments | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; the arguments up to ``adjust_lr_fn`` are those of torch.optim.Muon.

        Each is also an option of a group.

        Args:
            params: Groups, as of :func:`muon_groups`, or matrices.
            lr: A number, or a CPU tensor of one element, which is read at every step.
            weight_decay: Decoupled weight decay, multiplied by ``lr``.
            momentum: Decay of the average of gradients.
            nesterov: Orthogonalize the average of momentum and gradient, not the momentum itself.
            ns_coefficients: Of :func:`newton_schulz`.
            eps: The least norm that a momentum is divided by; in groups of AdamW its ``eps``, which
                is 1e-8 there unless the group has its own.
            ns_steps: The number of steps of :func:`newton_schulz`, which runs in bf16.
            adjust_lr_fn: ``"original"`` (or None): times the square root of rows / columns where
                there are more rows; ``"match_rms_adamw"``: times 0.2 and the square root of the
                larger, so that one learning rate suits matrices and AdamW.
            betas: AdamW's decay rates, in groups with ``use_muon=False``.
            update: The rounding mode of bf16 weights.
            moments: The format of the momentum, and of AdamW's moments.
            seed: Seed of stochastic rounding.

        Raises:
            PrecisionError: For a number outside its range, a group of Muon with a parameter that is
                no matrix, or the reasons of :class:`AdamW`.
        """
        require_option(bool(lr >= 0), "learning rate", lr, "lr >= 0")
        require_option(weight_decay >= 0, "weight_decay value", weight_decay, ">= 0")
        require_option(0 <= momentum < 1, "momentum value", momentum, "0 <= momentum < 1")
        require_option(eps > 0, "epsilon value", eps, "eps > 0")
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": checked_betas(betas),
            "use_muon": True,
        }
        super().__init__(params, options, update=update, moments=moments, seed=seed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim`` does, for Muon or, with ``use_muon=False``, for AdamW."""
        if not param_group.get("use_muon", True):
            param_group.setdefault("eps", _ADAMW_EPS)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for parameter in group["params"] if self.is_directed(group) else ():
                _require_whole(parameter)
        except PrecisionError:
            self.param_groups.pop()
            raise

    def is_directed(self, group: Mapping[str, Any]) -> bool:
        """Whether a group's parameters are moved along a direction, rather than by AdamW."""
        return self.algorithm_of(group) is not ADAMW

    def algorithm_of(self, group: Any) -> Algorithm:
        """Muon, or AdamW in groups with ``use_muon=False``."""
        return MUON if group["use_muon"] else ADAMW

    def check_step(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Refuse as every optimizer here, and gradients of other parameters than other ranks'."""
        super().check_step(gradients)
        if self.ranks is None:
            return
        given = set(map(id, gradients))
        every = [parameter for _, _, parameter in self._members()]
        held = [id(parameter) in given for parameter in every]
        mark = zlib.crc32(bytes(held))
        ends = torch.tensor([mark, -mark], device=every[0].device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.ranks)
        if int(ends.sum()):
            raise PrecisionError(
                f"Muon.ranks: this rank has gradients of {sum(held)} of {len(held)} parameters, "
                "and another rank of others, so they would exchange directions of different "
                "matrices; give all ranks the same gradients, or leave optimizer.ranks None"
            )

    def _run(self, group: dict[str, Any], plan: Plan, members: Members) -> None:
        if not self.is_directed(group):
            super()._run(group, plan, members)
            return
        for parameter, task, direction, factor in self._directions(group, plan, members):
            if self.on_direction is not None:
                self.on_direction(parameter, direction, factor)
            # element-wise again, so one kernel stores it in any rounding mode
            move = StepTask(
                weight=task.weight,
                remainder=task.remainder,
                moments=(),
                tops=(),
                gradient=flat(direction, dense(parameter)),
                stream=task.stream,
            )
            kernel = self._kernel(parameter.device, DIRECTED.name)
            kernel.run([move], replace(plan, algorithm=DIRECTED, moments="fp32", multiplier=factor))

    def _directions(
        self, group: dict[str, Any], plan: Plan, members: Members
    ) -> Iterator[tuple[nn.Parameter, StepTask, Tensor, float]]:
        """Each matrix with the direction of its update, of its shape, and a factor of that."""
        size, rank = 1, 0
        if self.ranks is not None:
            size, rank = dist.get_world_size(self.ranks), dist.get_rank(self.ranks)
        steps, coefficients, eps = (group[key] for key in ("ns_steps", "ns_coefficients", "eps"))
        # A turn has a matrix for each rank, of like sizes, as no rank goes on before the last.
        ordered = sorted(members, key=_products, reverse=True)
        for at in range(0, len(ordered), size):
            turn = ordered[at : at + size]
            found = [self._averaged(group, plan, parameter, task) for parameter, task in turn]
            if rank < len(turn):
                found[rank] = newton_schulz(found[rank], steps, coefficients, eps)
            if size > 1:
                found = [direction.contiguous() for direction in found]
                sent = [
                    dist.broadcast(direction, group=self.ranks, group_src=owner, async_op=True)
                    for owner, direction in enumerate(found)
                ]
                for work in sent:
                    work.wait()
            for (parameter, task), direction in zip(turn, found, strict=True):
                factor = adjustment(group["adjust_lr_fn"], *direction.shape)
                yield parameter, task, part_like(direction, whole_of(parameter)), factor

    def _averaged(
        self, group: dict[str, Any], plan: Plan, parameter: nn.Parameter, task: StepTask
    ) -> Tensor:
        """Average the gradient into the momentum: the whole matrix to orthogonalize, in bf16."""
        layout = dense(parameter)
        momentum = torch.zeros_like(layout, dtype=torch.bfloat16)  # in the weight's memory order
        average = replace(
            plan,
            algorithm=SGD,
            constants=averaging(group["momentum"], nesterov=group["nesterov"]),
            update="nearest",
        )
        weight = momentum.as_strided((momentum.numel(),), (1,))
        self._kernel(parameter.device, SGD.name).run(
            [replace(task, weight=weight, remainder=None, native=None)], average
        )
        placed: Any = place_like(momentum, whole_of(parameter))
        return placed.full_tensor() if is_sharded(placed) else placed  # type: ignore[no-any-return]


def _require_whole(parameter: nn.Parameter) -> None:
    """Refuse a part of a tensor that cannot be gathered."""
    if getattr(parameter, MARK, False):
        sharded = is_sharded(parameter)
        raise PrecisionError(
            f"a parameter of shape {tuple(parameter.shape)} is "
            f"{'a DTensor over several ranks' if sharded else f'marked {MARK}'}, and Muon needs "
            "whole tensors: update it by AdamW or Lion of halfstep.optim, or let every rank hold "
            "it whole"
        )


def _products(member: tuple[nn.Parameter, StepTask]) -> int:
    """Multiplications of a step of :func:`newton_schulz`: two by the matrix, and A A."""
    short, long = sorted(whole_of(member[0]).shape)
    return short * short * (2 * long + short)


def adjustment(kind: Adjustment | None, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix of this shape; see :class:`Muon`."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _check_options(group: dict[str, Any]) -> None:
    """Refuse options of Muon that mean nothing, and parameters that are no matrices."""
    kind, steps = group["adjust_lr_fn"], group["ns_steps"]
    allowed = get_args(Adjustment)
    if kind not in (None, *allowed):
        raise PrecisionError(
            f"Adjust learning rate function {kind} is not supported: adjust_lr_fn may be "
            f"{', '.join(allowed)} or None"
        )
    good = type(steps) is int and 0 < steps < _MOST_STEPS
    require_option(good, "ns_steps", steps, f"1 to {_MOST_STEPS - 1}")
    good = len(group["ns_coefficients"]) == len(COEFFICIENTS)
    require_option(good, "ns_coefficients", group["ns_coefficients"], "three numbers")
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


_HEADS = frozenset({"lm_head", "head", "classifier", "score"})


def muon_groups(
    model: nn.Module, *, adamw: Sequence[str] = (), **options: Any
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`Muon`: hidden matrices, and by reason what AdamW updates.

    Each group says what it is (``name``) and which parameters it has (``param_names``):
    ``matrices`` for Muon; ``embeddings`` (of an ``nn.Embedding``, tied to one, or called so),
    ``heads`` (of the shape of the largest embedding, or called head, lm_head, classifier or
    score), ``asked for`` and ``no matrices`` (norms, biases, convolutions), which do not decay, for
    AdamW. Frozen parameters are in none.

    Args:
        model: Any module.
        adamw: Patterns of parameter names, such as ``"*.gate.weight"``, for AdamW as well.
        options: Options of AdamW's groups, such as ``lr`` and ``betas``.

    Raises:
        PrecisionError: If a pattern matches no trainable parameter.

    **Source:** Jordan, as above: hidden layers only; embeddings and heads are AdamW's.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for pattern in adamw:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise PrecisionError(
                f"muon_groups(adamw={pattern!r}) matches none of {len(named)} trainable "
                f"parameters, such as {next(iter(named), 'none')}"
            )
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(table.weight) for table in tables}
    # of the words, not of positions, which may be as many as a hidden layer is wide
    head = max((table.weight.shape for table in tables), default=None)
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        *path, last = name.split(".")
        if any(fnmatchcase(name, pattern) for pattern in adamw):
            reason = "asked for"
        elif id(parameter) in embeddings or "embed" in ".".join([*path[-1:], last]):
            reason = "embeddings" if parameter.dim() > 1 else "no matrices"
        elif parameter.dim() != 2:
            reason = "no matrices"
        elif parameter.shape == head or (path and path[-1] in _HEADS):
            reason = "heads"
        else:
            reason = "matrices"
        found.setdefault(reason, []).append((name, parameter))
    groups = []
    for reason in ("matrices", "embeddings", "heads", "asked for", "no matrices"):
        if reason in found:
            group = {"params": found[reason], "name": reason, "use_muon": reason == "matrices"}
            own = {} if reason == "matrices" else options
            kept = {"weight_decay": 0.0} if reason == "no matrices" else {}
            groups.append(group | own | kept)
    return groups
