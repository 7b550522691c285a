"""The command ``halfstep memory``: what one step holds, measured under several policies."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from halfstep.cli.commands import Memory
from halfstep.cli.formats import table
from halfstep.cli.one_step import opened
from halfstep.diagnostics.memory import table as memory
from halfstep.diagnostics.memory.saved import MemoryMeter
from halfstep.errors import ConfigError
from halfstep.report.memory import require_figure_name, write_memory_figure
from halfstep.trainer.loop import attempt


def run(arguments: Memory) -> int:
    """Take one step under each policy, and print a table and why 16 bits did not halve it all."""
    out = Path(arguments.out) if arguments.out else None
    if out is not None:
        require_figure_name(out)  # before the steps
    found = [_measured(arguments, policy) for policy in arguments.precision or ("fp32", "")]
    found = [*{each.policy: each for each in found}.values()]
    bars = [(m.policy, m, None) for m in found]
    if out is not None and not write_memory_figure(bars, out):
        raise ConfigError(
            f"--out {out}: No figures: pip install 'halfstep[plot]' installs matplotlib, which "
            "draws them."
        )
    if arguments.json:
        plain = [each.to_json() for each in found]
        print(json.dumps({"policies": plain}, indent=1))
        return 0
    parts = [part for part in memory.PARTS if any(each.part(part) for each in found)]
    names = [*parts, "total"]
    head = ("policy", *names, "of the first")
    rows = [
        (
            each.policy,
            *(memory.size_text(each.part(part)) if each.part(part) else "-" for part in parts),
            memory.size_text(each.total),
            f"{each.total / found[0].total:.2f}",
        )
        for each in found
    ]
    lines = [table([head, *rows], set(range(1, len(head))))]
    lines += [
        f"\n{each.policy}: {each.why_not_half()}" for each in found[1:] if each.part("gradients")
    ]
    lines += [f"\nWritten: {out}"] if out is not None else []
    print("\n".join(lines))
    return 0


def _measured(arguments: Memory, policy: str) -> memory.Memory:
    with opened(arguments, policy, "memory") as session:
        batches, _ = session.micro_batches()
        with MemoryMeter(session.precision, batches[0]) as meter:
            attempt(session)
    gc.collect()  # what one policy held, before the next is measured
    return meter.memory
