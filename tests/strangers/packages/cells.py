"""A cell: one program under one policy, beside the same program in plain fp32."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass

import torch

import halfstep
from halfstep.errors import HalfstepError
from strangers.loops import POLICIES
from strangers.losses import Beside
from strangers.packages.runs import Program, Run

TRAINED, REFUSED, RAW, SKIPPED = "trained", "refused", "raw", "skipped"
SILENT = "silent"  # losses apart from those of fp32, or the very same: then nothing was rounded


@dataclass(frozen=True)
class Cell:
    """What a program did under a policy, and what was seen of it."""

    kind: str
    seen: str


def beside(program: Program) -> Beside:
    return Beside(lambda prepare: program.train(Run(prepare=prepare)))


def cell(program: Program, policy: str, plain: Beside) -> Cell:
    """Run it; ``seen`` is a ratio, or what an error said, or where the losses went apart."""
    try:
        losses = program.train(Run(policy))
    except HalfstepError as error:
        return Cell(REFUSED, str(error))
    except AssertionError as error:
        return Cell(SKIPPED, str(error))
    except Exception as error:
        return Cell(RAW, f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
    if policy != "fp32" and losses == plain.plain:
        return Cell(SILENT, "to the last bit the losses of plain fp32")
    if program.own_loss and len(losses) == len(plain.plain):
        losses = unrounded(policy, losses, plain.plain)
    ratio = plain.ratio(policy, losses) / program.amplifies
    if ratio > 1:
        return Cell(SILENT, f"{ratio:.2f}: {plain.apart(policy, losses)}")
    return Cell(TRAINED, f"{ratio:.2f}")


def unrounded(policy: str, losses: list[float], plain: list[float]) -> list[float]:
    """Losses that were rounded to the weights' format, as near to the plain ones as they may be."""
    stored = halfstep.parse_policy(policy).param_dtype
    if stored == torch.float32:
        return losses
    half_a_gap = torch.finfo(stored).eps / 2
    return [
        mine + max(-half_a_gap * abs(mine), min(own - mine, half_a_gap * abs(mine)))
        for mine, own in zip(losses, plain, strict=True)
    ]


def unexpected(program: Program, cells: dict[str, Cell]) -> dict[str, Cell]:
    """The cells that are not what the program has written down of itself."""
    wrong = {}
    for policy, found in cells.items():
        reason = program.refused.get(policy)
        expected = TRAINED if reason is None else REFUSED
        if found.kind != expected or (reason or "") not in found.seen:
            wrong[policy] = found
    return wrong


def check(program: Program) -> None:
    """Every policy trains the program beside fp32, or refuses it as written down.

    The bound must see a program that learns at half its rate; else it would see nothing.
    """
    plain = beside(program)
    wrong_run = program.train(Run(rate=0.5))
    sharp = ("bf16-mixed", "fp16-mixed")
    blind = [p for p in sharp if plain.ratio(p, wrong_run) <= program.amplifies]
    assert not blind, f"half the learning rate passes under {blind}"
    cells = {policy: cell(program, policy, plain) for policy in POLICIES}
    if program.rule and program.bare is not None:
        bare = dataclasses.replace(program, train=program.bare)
        needed = cell(bare, "bf16-master", plain)
        assert needed.kind == REFUSED, needed
        assert "keep_fp32" in needed.seen, needed
    wrong = unexpected(program, cells)
    assert not wrong, "; ".join(f"{p}: {found.kind}, {found.seen}" for p, found in wrong.items())
