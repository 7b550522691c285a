"""The command ``halfstep estimate``: the memory of training before there is a run."""

from __future__ import annotations

import json

from halfstep.cli.commands import Estimate
from halfstep.diagnostics.memory import PARTS, Memory, size_text
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.policy.devices import name_of
from halfstep.precision.policy.spelling import parse_policy
from halfstep.shown import aligned
from halfstep.trainer.config.config import load_config
from halfstep.trainer.environment import choose_device
from halfstep.trainer.estimate import estimate_config, estimate_count, read_count
from halfstep.trainer.memory import memory_bytes

_POLICIES = (
    "fp32", "fp16-mixed", "bf16-mixed", "bf16-master", "bf16-split", "bf16-split,moments=8bit"
)  # fmt: skip


def run(arguments: Estimate) -> int:
    """Print a table of the memory's parts under each policy."""
    if arguments.params and arguments.config:
        raise ConfigError("--params and --config: give one of them")
    if arguments.batch_size < 0:
        raise ConfigError(f"--batch-size {arguments.batch_size}; allowed: integers >= 0")
    layout = Layout.parse(arguments.parallel)
    device = choose_device("auto")
    spec = arguments.config or "gpt-small-cpu"
    changes = [("optimizer.name", arguments.optimizer)] if arguments.optimizer else []
    optimizer = load_config(spec, changes).optimizer
    policies = [parse_policy(text, device) for text in arguments.precision or _POLICIES]
    have = read_count(arguments.memory, "--memory") if arguments.memory else memory_bytes(device)
    if arguments.params:
        count = read_count(arguments.params, "--params")
        found = estimate_count(count, policies, layout, optimizer)
    else:
        found = estimate_config(spec, policies, arguments.batch_size, layout, optimizer)
    if arguments.json:
        rows = [{**m.to_json(), "largest_batch": m.largest_batch(have)} for m in found]
        print(json.dumps({"memory_bytes": have, "policies": rows}, indent=1))
    else:
        what = "this machine" if device.type == "cpu" else name_of(device)
        own = f"fits: in the {size_text(have)} of {what}"
        fits = f"fits: in {size_text(have)}" if arguments.memory else own
        print(_text(found, have, fits, layout))
    return 0


def _text(found: list[Memory], have: int, fits: str, layout: Layout) -> str:
    with_batch = any(memory.rows for memory in found)
    parts = [part for part in PARTS if any(memory.part(part) for memory in found)]
    names = [*parts, "total"]
    head = ("policy", *names, "fits", *(["largest batch"] * with_batch))
    rows = [
        (
            memory.policy,
            *(size_text(memory.part(part)) if memory.part(part) else "-" for part in parts),
            size_text(memory.total),
            "yes" if memory.total <= have else "no",
            *([str(memory.largest_batch(have))] if with_batch else []),
        )
        for memory in found
    ]
    notes = [fits]
    if with_batch:
        notes.append(f"a micro-batch of {found[0].rows}")
    else:
        notes.append("without activations, which depend on model and batch")
    if layout.size > 1:
        notes.append(f"on each of {layout.size} ranks ({layout})")
    lines = [aligned([head, *rows], range(1, len(head))), ""]
    lines.append(f"{'; '.join(notes)}.")
    lines.append("Temporary tensors, the allocator's rounding and the process come on top.")
    return "\n".join(lines)
