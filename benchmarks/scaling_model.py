"""Weak scaling up to 1,024 GPUs, on paper: bytes by the program's formulas over stated links.

    python benchmarks/scaling_model.py [--measured RANKS_CPU_JSON] [--figure FILE.svg]

**This is a model. Nothing in it is measured on a GPU.** It says which layout and policy a link can
carry, not what a run will reach. Weak scaling: every rank has the same batch whatever N is.

What a rank sends comes from ``halfstep.distributed.traffic``, as ``sent_bytes`` in metrics.jsonl.
How long it takes:

- Machines hold 8 GPUs. Ranks of one machine talk at NVLink's 450 GB/s each way.
- A ring over several machines (all-reduce, all-gather, reduce-scatter) leaves each machine once,
  spread over all its network ports: a machine sends out what one rank sends.
- Our 16-bit sum over several machines with several ranks each has two levels: within machines at
  NVLink's speed, and between them, where each rank sends its share through its own port. One after
  the other.
- Only bandwidth counts. Latency, which grows with N, and congestion are left out.

How long a rank computes: 6 FLOP a token and parameter (Kaplan et al. 2020) at 40 % of the peak; one
third is forward, two thirds are backward. Step times::

    no overlap  compute + all communication
    overlap     max(forward, gathers in it) + max(backward, gathers and sums of gradients in it)
                + sums of activations under tensor parallelism, for which the next product waits

Efficiency is compute / step. The optimizer's own time is left out.

Sources: H100 SXM data sheet (989 TFLOP/s dense bf16, 67 TFLOP/s fp32, NVLink 900 GB/s both ways);
DGX H100 (8 ports of 400 Gb/s); 40 %: GPT-2 124M in llm.c on 8 H100, 468,000 tokens/s a GPU.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from halfstep.distributed.layout import Layout
from halfstep.distributed.select import decide
from halfstep.distributed.traffic import (
    Traffic,
    all_gather,
    all_reduce,
    data_parallel,
    fully_sharded,
    tensor_parallel,
)
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig

MACHINE = 8
NVLINK = 450e9  # bytes per second of one GPU, one direction
LINKS = {"InfiniBand": 50e9, "Ethernet": 12.5e9 / MACHINE}  # the same, out of the machine
LINK_NAMES = {
    "InfiniBand": "InfiniBand, 400 Gb/s a GPU",
    "Ethernet": "Ethernet, 100 Gb/s a machine of 8",
}
PEAK = {torch.bfloat16: 989e12, torch.float32: 67e12}
UTILISATION = 0.4
MEMORY = 80e9
VOCABULARY = 50257

SIZES = (1, 2, 8, 64, 256, 1024)
POLICIES = ("fp32", "bf16-mixed", "bf16-mixed,reduce=bf16", "bf16-module", "bf16-split")
LAYOUTS = ("data=N", "shard=N", "data=N/8,tensor=8")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the batch of one rank."""

    name: str
    config: GPTConfig
    in_blocks: int
    outside: int
    tokens: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.in_blocks + self.outside


def shape(name: str, config: GPTConfig, rows: int) -> Shape:
    """Count the parameters; the batch is ``rows`` whole sequences."""
    with torch.device("meta"):
        model = GPT(config)
    total = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for block in model.blocks() for p in block.parameters())
    return Shape(name, config, blocks, total - blocks, rows * config.block_size)


def shipped(name: str) -> tuple[GPTConfig, int]:
    """A shipped configuration's model, and its rows of one micro-batch."""
    text = (files("halfstep") / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    config = GPTConfig(**content["model"], vocab_size=VOCABULARY)
    return config, content["run"]["batch_size"] // content["run"]["grad_accum"]


def shapes() -> list[Shape]:
    """GPT-2 and GPT-2 XL as shipped, and one of 7 B."""
    large = GPTConfig(n_layer=32, n_head=32, n_embd=4096, block_size=2048, vocab_size=VOCABULARY,
                      activation_checkpointing=True)  # fmt: skip
    return [
        shape("124M", *shipped("gpt2")),
        shape("1.5B", *shipped("gpt2-xl")),
        shape("7B", large, 4),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, layout, policy and link."""

    sent: Traffic
    """Bytes that a rank sends in a step."""
    compute: float
    """Seconds; so are the others."""
    in_forward: float
    in_backward: float
    waited_for: float

    @property
    def communication(self) -> float:
        """Seconds of it, hidden or not."""
        return self.in_forward + self.in_backward + self.waited_for

    @property
    def efficiency(self) -> float:
        """With overlap."""
        forward = max(self.compute / 3, self.in_forward)
        backward = max(self.compute * 2 / 3, self.in_backward)
        return self.compute / (forward + backward + self.waited_for)

    @property
    def bound(self) -> float:
        """Efficiency without any overlap."""
        return self.compute / (self.compute + self.communication)


def layout_of(template: str, size: int) -> Layout | None:
    """The layout of ``size`` ranks; None where 8 tensor ranks are more than there are."""
    if template == "data=N/8,tensor=8":
        return Layout(data=size // 8, tensor=8) if size >= 8 else None
    return Layout.parse(template.replace("N", str(size)))


def why_not(model: Shape, policy: PrecisionPolicy, layout: Layout) -> str:
    """Why there is no such run; empty if there is."""
    if decide(
        policy, Layout(data=2 * layout.data, shard=layout.shard, tensor=layout.tensor)
    ).refused:
        return "refused"
    if model.config.n_head % layout.tensor:
        return "heads"
    per_rank = model.parameters * sum(bytes_per_parameter(policy).values())
    if layout.shard * layout.tensor == 1 and per_rank > MEMORY:
        return "memory"
    return ""


def seconds(sent: int, ranks: int, per_machine: int, out: float) -> float:
    """How long one collective takes, along a ring or in one level.

    Args:
        sent: Bytes that a rank sends.
        ranks: In the group.
        per_machine: Of the group's ranks on one machine, at most.
        out: Bytes per second of one GPU's port out of the machine.
    """
    if ranks <= per_machine:
        return sent / NVLINK
    return max(sent / (per_machine * out), sent / NVLINK if per_machine > 1 else 0.0)


def cell(model: Shape, policy: PrecisionPolicy, layout: Layout, out: float) -> Cell:
    """Bytes and seconds of one step with one micro-batch."""
    peak = PEAK[policy.compute_dtype]
    compute = 6 * model.parameters * model.tokens / (peak * UTILISATION)
    reduce_bytes = policy.reduce_dtype.itemsize
    if layout.shard > 1:
        gathered = policy.compute_dtype if policy.casts == "module" else policy.param_dtype
        sizes = {"gather_bytes": gathered.itemsize, "reduce_bytes": reduce_bytes}
        sent = fully_sharded(model.in_blocks, layout.shard, **sizes) + fully_sharded(
            model.outside, layout.shard, **sizes, reshard_after_forward=False
        )
        again = all_gather(model.in_blocks * gathered.itemsize, layout.shard)
        forward = seconds(sent.parameters - again, layout.shard, MACHINE, out)
        backward = seconds(again, layout.shard, MACHINE, out)
        backward += seconds(sent.gradients, layout.shard, MACHINE, out)
        return Cell(
            sent=sent, compute=compute, in_forward=forward, in_backward=backward, waited_for=0.0
        )
    mine = -(-model.parameters // layout.tensor)
    per_machine = MACHINE // layout.tensor
    gradients = data_parallel(mine, layout.data, reduce_bytes=reduce_bytes)
    activations = tensor_parallel(
        layout.tensor * model.tokens,  # a tensor group takes the batch of all its ranks
        model.config.n_embd,
        model.config.n_layer,
        layout.tensor,
        activation_bytes=policy.compute_dtype.itemsize,
        recomputed=model.config.activation_checkpointing,
    )
    backward = seconds(gradients.gradients, layout.data, per_machine, out)
    if reduce_bytes == 2 and 1 < per_machine < layout.data:  # in two levels
        share = -(-mine * reduce_bytes // per_machine)
        leaves = all_reduce(share, layout.data // per_machine)
        backward = (gradients.gradients - leaves) / NVLINK + leaves / out
    return Cell(
        sent=gradients + activations,
        compute=compute,
        in_forward=0.0,
        in_backward=backward,
        waited_for=seconds(activations.activations, layout.tensor, MACHINE, out),
    )


def rows(model: Shape) -> Iterator[tuple[str, str]]:
    """Layout and policy of all runs that there are."""
    for template in LAYOUTS:
        for name in POLICIES:
            layout = layout_of(template, 1024)
            assert layout is not None
            if not why_not(model, parse_policy(name), layout):
                yield template, name


def short(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Two or three digits and the largest unit that fits."""
    factor, unit = next(((f, u) for f, u in units if value >= f), units[-1])
    number = value / factor
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:.0f} {unit}"


def percent(found: Cell) -> str:
    """Efficiency with overlap and, where it differs, without."""
    high, low = (f"{100 * value:.0f}" for value in (found.efficiency, found.bound))
    return high if high == low else f"{high} ({low})"


def step_table(model: Shape, link: str) -> str:
    """Bytes, milliseconds and efficiency by number of ranks."""
    lines = ["| layout | policy | " + " | ".join(f"{size:,}" for size in SIZES) + " |"]
    lines.append("|---" * (len(SIZES) + 2) + "|")
    for template, name in rows(model):
        cells = []
        for size in SIZES:
            layout = layout_of(template, size)
            if layout is None:
                cells.append("")
                continue
            found = cell(model, parse_policy(name), layout, LINKS[link])
            if not found.sent.total:
                cells.append(f"0 · 0 · {percent(found)}")
                continue
            bytes_ = short(found.sent.total, ((1e9, "GB"), (1e6, "MB")))
            time = short(found.communication, ((1.0, "s"), (1e-3, "ms")))
            cells.append(f"{bytes_} · {time} · {percent(found)}")
        lines.append(f"| `{template}` | `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def end_table(size: int = 1024) -> str:
    """Efficiency of every model over every link at ``size`` ranks."""
    models = shapes()
    heads = [f"{model.name}, {link}" for model in models for link in LINKS]
    lines = ["| layout | policy | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for template in LAYOUTS:
        layout = layout_of(template, size)
        assert layout is not None
        for name in POLICIES:
            policy = parse_policy(name)
            cells = [
                why_not(model, policy, layout) or percent(cell(model, policy, layout, out))
                for model in models
                for out in LINKS.values()
            ]
            if set(cells) != {"refused"}:
                lines.append(f"| `{template}` | `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


STYLES = {
    ("data=N", "bf16-mixed"): ("#1f77b4", "o"),
    ("data=N", "bf16-mixed,reduce=bf16"): ("#d62728", "v"),
    ("shard=N", "bf16-mixed"): ("#2ca02c", "s"),
    ("shard=N", "bf16-module"): ("#9467bd", "D"),
    ("data=N/8,tensor=8", "bf16-mixed"): ("#e08214", "^"),
}


def measured_points(path: Path | None) -> dict[str, float]:
    """Layout to measured efficiency of two CPU ranks; empty without the file."""
    if path is None or not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))["weak_scaling"]
    return {
        name.split("=")[0]: found[name]["efficiency"] for name in ("data=2 fp32", "shard=2 fp32")
    }


def draw(target: Path, measured: dict[str, float]) -> None:
    """Efficiency over the number of ranks, one plot for each model and link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "halfstep", "font.size": 9})
    models = shapes()
    figure, plots = plt.subplots(
        len(LINKS), len(models), figsize=(10.5, 6.6), sharex=True, sharey=True, facecolor="white"
    )
    sizes = (1, 2, 8, 16, 64, 256, 1024)
    for line, (link, out) in zip(plots, LINKS.items(), strict=True):
        for plot, model in zip(line, models, strict=True):
            plot.set_title(f"{model.name}, {model.tokens:,} tokens a rank\n{LINK_NAMES[link]}",
                           fontsize=9)  # fmt: skip
            plot.axvline(MACHINE, color="#bbbbbb", linewidth=0.8, zorder=0)
            for (template, name), (color, marker) in STYLES.items():
                if (template, name) not in [*rows(model)]:
                    continue
                laid = [(n, layout_of(template, n)) for n in sizes]
                found = [(n, cell(model, parse_policy(name), x, out)) for n, x in laid if x]
                xs = [n for n, _ in found]
                plot.plot(xs, [100 * c.efficiency for _, c in found], color=color, marker=marker,
                          markersize=3.5, linewidth=1.3)  # fmt: skip
                plot.plot(xs, [100 * c.bound for _, c in found], color=color, linestyle=":",
                          linewidth=1.1)  # fmt: skip
            plot.set_xscale("log", base=2)
            plot.set_xticks([1, 8, 64, 256, 1024], ["1", "8", "64", "256", "1024"])
            plot.set_ylim(0, 105)
            plot.grid(color="#eeeeee", linewidth=0.6)
    for plot in plots[-1]:
        plot.set_xlabel("GPUs (grey line: one machine)")
    for plot in plots[:, 0]:
        plot.set_ylabel("weak-scaling efficiency, %")
    first = plots[0, 0]
    marks = {"data": "P", "shard": "X"}
    for name, efficiency in measured.items():
        first.plot([2], [100 * efficiency], color="black", marker=marks[name], linestyle="none",
                   markersize=7)  # fmt: skip
    handles = [
        plt.Line2D([], [], color=color, marker=marker, markersize=4, label=f"{template}  {name}")
        for (template, name), (color, marker) in STYLES.items()
    ]
    handles.append(plt.Line2D([], [], color="#555555", linestyle=":", label="the same, no overlap"))
    handles += [
        plt.Line2D([], [], color="black", marker=marks[name], linestyle="none", markersize=7,
                   label=f"MEASURED, 2 CPU ranks, {name}=2: {100 * value:.0f} %")
        for name, value in measured.items()
    ]  # fmt: skip
    note = "A model on paper: nothing is measured on GPUs. Lines at 100 % lie on one another."
    if not measured:
        note += "\nNo measured CPU point: benchmarks/ranks_cpu.py was not run."
    figure.suptitle(note, fontsize=10)
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.11, 1, 0.99))
    figure.savefig(target, facecolor="white", dpi=110,
                   **({"metadata": {"Date": None}} if target.suffix == ".svg" else {}))  # fmt: skip
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, help="the JSON that ranks_cpu.py wrote")
    parser.add_argument("--figure", type=Path, help="where to draw; none is drawn without")
    arguments = parser.parse_args()
    print("A model on paper; nothing is measured on GPUs. Each rank has the same batch at every N.")
    print(
        "Cells: bytes a rank sends in a step, its communication, efficiency in % with full overlap"
    )
    print("(and without any, where that differs).")
    for model in shapes():
        mine = 6 * model.parameters * model.tokens / UTILISATION
        print(f"\n## {model.name}: {model.parameters:,} parameters, {model.tokens:,} tokens, "
              f"{mine / PEAK[torch.bfloat16] * 1e3:.0f} ms of compute in bf16, "
              f"{mine / PEAK[torch.float32] * 1e3:.0f} ms in fp32")  # fmt: skip
        for link, name in LINK_NAMES.items():
            print(f"\n{name}:\n\n{step_table(model, link)}")
    print(f"\n## Efficiency at 1,024 ranks\n\n{end_table()}")
    if arguments.figure is not None:
        measured = measured_points(arguments.measured)
        draw(arguments.figure, measured)
        print(f"\nfigure: {arguments.figure}" + ("" if measured else " (without a measured point)"))


if __name__ == "__main__":
    main()
