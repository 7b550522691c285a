"""The arguments of each command, as a dataclass whose fields are the command's options.

The grammar derives options, types, defaults and help from the fields; for commands that start a run
it uses the task's configuration. Nothing here imports torch, so that --help is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halfstep.option import Count, option
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS
from halfstep.trainer.config.use import Evaluating, Exporting, Generating, Predicting


@dataclass(frozen=True, kw_only=True)
class Start:
    """The options of every command that starts a run, besides the keys of its configuration."""

    config: str = option(
        "",
        "A TOML file, or a configuration that is shipped: gpt-tiny, gpt-small-cpu, gpt2, "
        "gpt2-medium, gpt2-large, gpt2-xl, classify-scratch, classify-pretrained, lm-lora, "
        "lm-full; default: the task's.",
    )
    resume: bool = option(False, "Go on with the run in --output-dir, bit for bit.")
    quiet: bool = option(False, "Show no progress on stderr.")
    nproc: Count = option(
        0,
        "Start this many ranks on this machine; options of torchrun may follow after --, such as "
        "-- --max-restarts 3, or -- --nnodes 2 --node-rank 0 --master-addr HOST.",
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parsed command line of a command that starts a run."""

    kind: type[BaseConfig]
    """The class of the run's configuration."""
    start: Start
    given: Mapping[str, Any]
    """Configuration keys that the command line sets, with their values as text."""
    words: list[str]
    """The command line itself, without torchrun's options."""
    launcher: list[str]
    """torchrun's options, which follow ``--``."""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Explain what a precision policy means, costs and needs.

    mxfp8,simulate=yes is a policy, too: on a device without products of that format.
    """

    policies: tuple[str, ...] = option(
        (), "Names, field strings or files; default: all.", positional=True
    )
    device: str = option("auto", "auto, cpu, mps, cuda or cuda:N.")


@dataclass(frozen=True, kw_only=True)
class OneStep:
    """The options of commands that look at one training step, of which nothing is kept."""

    run: str = field(
        metadata={
            "help": "A run folder; the step after its newest checkpoint is taken.",
            "positional": True,
        }
    )
    device: str = option("", "auto, cpu, cuda or cuda:N; default: the run's.")


@dataclass(frozen=True, kw_only=True)
class Trace(OneStep):
    """Show what one training step really runs: every operation, and in which format.

    The step is the next one of a run; nothing of it is kept. Below the table are the operations
    that ran otherwise than the policy says.
    """

    precision: str = option("", "Policy; default: the run's.")


@dataclass(frozen=True, kw_only=True)
class Memory(OneStep):
    """Measure what one training step holds, by part and format, under several policies.

    The step is the next one of a run; nothing of it is kept.
    """

    precision: tuple[str, ...] = option((), "Policies; default: fp32 and the run's.")


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Show the number formats, and what each makes of a number.

    Without VALUE: range and precision of every format. With VALUE, read as fp64: the number that
    each format rounds it to, its bits, and the rounding error. With --block: the scales, codes and
    numbers of a block that begins with the VALUEs.
    """

    values: tuple[str, ...] = option(
        (),
        "Decimal (0.1, -1e-8), hexadecimal (0x1.8p-3), inf or nan; with --block, several.",
        positional=True,
    )
    block: str = option(
        "", "A format whose numbers share scales: fp8, fp8-block, mxfp8, mxfp4, nvfp4, ..."
    )


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say which precision a machine is good for, and why.

    A device of this machine is measured; one that is only named, such as T4, is looked up in
    halfstep's table. Paste the output of --json into an issue.
    """

    device: tuple[str, ...] = option(
        ("auto",),
        "auto, cpu, cuda, cuda:N, mps, or the names of products, such as T4 A100 'RTX 3090'.",
    )
    json: bool = option(False, "Print one JSON object on stdout.")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate the memory of training, by part and policy, before there is a run.

    With --params: weights, gradients and optimizer state of any model of that size. With --config:
    also what a step of that GPT saves for its backward, and the largest batch that fits.
    """

    params: str = option("", "Number of parameters: 1.3B, 124M, 7e9.")
    lora: str = option(
        "", "With --params: parameters of the adapters, which alone are trained: 40M."
    )
    base: Literal["", "4bit"] = option(
        "",
        "With --lora, how the frozen weights are held: 4bit (NF4, as QLoRA); default: in the "
        "dtype that the policy computes in.",
    )
    config: str = option(
        "", "A configuration of halfstep train; default, without --params: gpt-small-cpu."
    )
    precision: tuple[str, ...] = option(
        (),
        "Policies, separated by spaces; default: fp32, fp16-mixed, bf16-mixed, bf16-master and "
        "bf16-split, also with moments=8bit.",
    )
    optimizer: str = option(
        "", "The optimizer, as --optimizer.name of halfstep train; default: the configuration's."
    )
    batch_size: Count = option(
        0, "Sequences of one micro-batch on one rank; 0: the configuration's."
    )
    parallel: str = option(
        "",
        'The layout of the ranks, of each of which the memory is estimated: "shard=4" or '
        '"data=2,tensor=2", as for halfstep train; default: one device.',
    )
    memory: str = option(
        "", "The device's memory, such as 16GB; default: of the device that this machine trains on."
    )
    json: bool = option(False, "Print one JSON object on stdout.")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one page about one or several runs: what happened to them, and what to do.

    The page is a single file without scripts or network.
    """

    runs: tuple[str, ...] = option((), "Folders of runs.", positional=True)
    out: str = option(
        "",
        "The .html file to write; default: report.html in the run's folder, for several runs in "
        "the current one.",
    )
    lang: Literal["en", "zh"] = option("en", "Language of the page.")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Replay a captured step of a run, bit for bit, or in another precision."""

    capture: str = field(
        metadata={"help": "A folder in captures/ of a run with run.capture.", "positional": True}
    )
    precision: str = option("", "The policy to replay it in, such as fp32; default: the run's own.")


COMMANDS: Mapping[str, type[Any]] = {
    **{kind.COMMAND: kind for kind in TASKS.values() if kind.COMMAND},
    "predict": Predicting,
    "generate": Generating,
    "evaluate": Evaluating,
    "export": Exporting,
    "explain": Explain,
    "trace": Trace,
    "memory": Memory,
    "formats": Formats,
    "doctor": Doctor,
    "estimate": Estimate,
    "report": Report,
    "replay": Replay,
}
"""Words of a command to its dataclass of arguments."""

MODULES: Mapping[str, str] = {
    **dict.fromkeys(("explain", "formats", "doctor", "estimate", "report", "replay"), "small"),
    **dict.fromkeys(("predict", "generate", "evaluate", "export"), "trained"),
    **dict.fromkeys(("trace", "memory"), "one_step"),
    "finetune": "train",
}
"""First word of a command to the module of ``halfstep.cli`` that runs it, where that has another
name."""
