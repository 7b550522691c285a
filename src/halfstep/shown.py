"""Text in the columns of a terminal, as what is to be typed there, and what was found."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unicodedata import east_asian_width

LAUNCHER = "HALFSTEP_LAUNCHER"
"""The environment's name for the options by which ``halfstep`` has started these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a command proved of the files or the program that it was given.

    Attributes:
        level: A ``"fault"`` or a ``"warning"`` is found, and makes the exit code 1; a ``"note"`` is
            only said.
        name: Of the kind of finding, for programs: ``"norms_at_one"``.
        what: The proof, in a sentence with its numbers.
        do: What helps; empty if nothing is to be done.
        where: The tensors, modules or operations concerned, all of them.
        values: The numbers of the sentence, for programs.
    """

    level: Literal["fault", "warning", "note"]
    name: str
    what: str
    do: str = ""
    where: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.level} {self.name}: {self.what}"]
        if self.where:
            more = len(self.where) - 3
            lines.append(f"  in: {', '.join(self.where[:3])}{f', and {more} more' * (more > 0)}")
        return "\n".join([*lines, *([f"  do: {self.do}"] if self.do else [])])


def role(name: str) -> str:
    """The name of a tensor or module without its numbers: that of all layers alike.

    Example:
        >>> role("layers.11.mlp.up_proj.weight")
        'layers.*.mlp.up_proj.weight'
    """
    return re.sub(r"(?<![^./])\d+(?![^./])", "*", name)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align rows in columns, those with an index in ``right`` flush right."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            (cell.rjust if i in right else cell.ljust)(width - _width(cell) + len(cell))
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _width(cell: str) -> int:
    """Count the places of a text: 字 takes two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in cell)


def typed(
    command: str, run: Mapping[str, Any], changes: Mapping[str, object], *, resume: bool
) -> str:
    """Write what goes on with a run, or trains it anew in folders of its own, with changes.

    ``run`` is that section of its configuration; ``command`` is empty if a program trains it.
    """
    folder = run["output_dir"]
    if not command:
        given = {**changes, "output_dir": folder} if resume else changes
        words = [f"{k}={v if k == 'learning_rate' else repr(v)}, " for k, v in given.items()]
        return f"Trainer({''.join(words)}...).train({'resume=True' * resume})"
    start, given = "--resume", {"output_dir": shlex.quote(folder), **changes}
    if not resume:
        start = f"--config {shlex.quote(f'{folder}/config.toml')}"
        held = [k for k in ("output_dir", "checkpoint_dir", "second_dir") if run.get(k)]
        given = {k: shlex.quote(f"{run[k]}-2") for k in held} | {**changes}
    options = "".join(f" --{key.replace('_', '-')} {value}" for key, value in given.items())
    return f"halfstep {command} {start}{options}{_launched(str(run.get('parallel', '')))}"


def _launched(parallel: str) -> str:
    """The options that start as many ranks again; outside of ranks, as many as a layout needs."""
    given = os.environ
    text = " --nproc {LOCAL_WORLD_SIZE} -- --max-restarts {TORCHELASTIC_MAX_RESTARTS}"
    if "LOCAL_WORLD_SIZE" not in given:  # which torchrun sets
        ranks = math.prod(map(int, re.findall(r"=(\d+)", parallel)))
        return f" --nproc {ranks}" * (ranks > 1)
    if known := given.get(LAUNCHER):
        return f" {known}"
    if given["LOCAL_WORLD_SIZE"] != given["WORLD_SIZE"]:
        text += " --nnodes {GROUP_WORLD_SIZE} --node-rank {GROUP_RANK}"
        text += " --master-addr {MASTER_ADDR} --master-port {MASTER_PORT}"
    return text.format_map(given)
