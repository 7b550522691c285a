"""Run some hundred programs and tell what they do: losses, steps, messages, exit codes, tensors.

``programs.json`` holds what they did, for each kind of CPU; ``test_programs.py`` compares. A change
that is not numerical leaves every line alone; one that changes a message or a number on purpose
records its group anew, and the difference of the JSON file shows what changed::

    python tests/golden/programs.py commands              # print what a group does
    python tests/golden/programs.py --record commands     # and write it down; without names: all

``--record`` runs on this CPU as it is, then as one without bf16 instructions, as ``make
test-without-bf16`` does. The programs use the public interface alone, so an older tree can be asked
as well: ``PYTHONPATH=OLD/src python tests/golden/programs.py --record``. The folder ``v0.2-full``
holds three runs of four steps, as that release left them after the second.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Before torch is imported: sums are cut alike whoever calls, and messages are in English.
os.environ |= {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfstep
from halfstep.cli.main import main as halfstep_command
from halfstep.trainer.checkpoint import load_checkpoint

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = HERE / "programs.json"
KEPT = HERE / "v0.2-full"
WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
KEEP = 8  # losses or steps of a list that are written down; all go into its hash
Seen = dict[str, Any]


def kind() -> str:
    """Name what decides the last bits of a sum here: torch, the maker of the CPU, its kernels."""
    # By Path.read_text, from which tests/without_bf16 takes the flags out.
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    flags = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in words] or ["no bf16"]
    maker = words[words.index("vendor_id") + 2] if "vendor_id" in words else "?"
    release = ".".join(torch.__version__.split(".")[:2])
    return " ".join([f"torch {release}", maker, torch.backends.cpu.get_cpu_capability(), *flags])


# --- what is written down ---

# What depends on the clock, the machine or the place of the code, and what is no news.
NOT_RECORDED = (
    (re.compile(r"^.* tok/s .*\n?", re.M), ""),  # a progress line: how many depends on the clock
    (re.compile(r"peak memory [\d.]+ [kMG]B"), "peak memory N"),
    (re.compile(r"\S*/(\w+\.py):\d+"), r"\1"),
    (re.compile(r"^'?[^\n]*train_runtime[^\n]*\n", re.M), ""),
    (re.compile(r" +[\d,]+ +[\d,]+ MB$", re.M), " N"),  # speed and peak in a table of a report
)


def lines(text: str) -> list[str]:
    """Return a message's lines, without what differs from run to run."""
    for pattern, instead in NOT_RECORDED:
        text = pattern.sub(instead, text)
    return text.rstrip().splitlines()


def number(value: float | str) -> str:
    """Spell a number exactly."""
    value = float(value)
    return re.sub(r"\.?0*p", "p", value.hex()) if math.isfinite(value) else str(value)


def digest(tensors: Iterable[Any]) -> str:
    """Hash dtypes, shapes and bits of tensors, or of whatever else there is."""
    found = hashlib.sha256()
    for one in tensors:
        if isinstance(one, Tensor):
            found.update(f"{one.dtype} {tuple(one.shape)}".encode())
            found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(one).encode())
    return "sha256 " + found.hexdigest()[:16]


def thin(values: list[str]) -> list[str]:
    """Return some of a list's lines, and a hash of all of them where it is long."""
    if len(values) <= 2 * KEEP:
        return values
    return [*values[:: -(-len(values) // KEEP)], values[-1], digest(values)]


def step_line(result: Any) -> str:
    """Spell a StepResult, or the ``last_step`` of a scaler."""
    names = ", ".join(result.nonfinite_parameters)
    return (
        f"{result.reason or 'applied'} loss {number(result.loss)} "
        f"norm {number(result.grad_norm)} scale {result.loss_scale:g} to "
        f"{result.next_loss_scale:g} skipped {result.skipped_total}{names and f' in {names}'}"
    )


def state_digests(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Hash an optimizer's state, key by key."""
    states = optimizer.state_dict()["state"].values()
    keys = sorted({key for state in states for key in state})
    return {key: digest(state.get(key) for state in states) for key in keys}


def file_digests(folder: Path) -> dict[str, str]:
    """Hash the tensors of a folder's safetensors files, by name."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(path)
        names = sorted(tensors)
        found[path.name] = digest([*names, *(tensors[name] for name in names)])
    return found


def checkpoint_digests(folder: Path) -> dict[str, str]:
    """Hash the tensors of a checkpoint, by name."""
    held = load_checkpoint(folder)
    both = {"optimizer.safetensors": held.optimizer, "weights.safetensors": held.weights}
    return {k: digest([*sorted(of), *(of[n] for n in sorted(of))]) for k, of in both.items()}


def run_seen(run: Path) -> Seen:
    """Tell what a run left: its steps, and the tensors of its last checkpoint."""
    steps = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        told = entry.get("skip_reason") or ("applied" if entry["applied"] else "skipped")
        rate = entry.get("learning_rate", math.nan)
        text = f"{entry['step']} {told} loss {number(entry['loss'])} scale {entry['loss_scale']:g}"
        text += f" norm {number(entry['grad_norm'])} rate {rate:.6g}"
        steps.append(text + (f" val {number(entry['val_loss'])}" if "val_loss" in entry else ""))
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    steps = thin(steps)
    return {"run": steps, "checkpoint": checkpoint_digests(checkpoints[-1]) if checkpoints else {}}


def each(programs: dict[str, Callable[[], Any]]) -> Seen:
    """Run programs one after the other; what one raises is recorded, and the others still run."""
    found = {}
    for name, program in programs.items():
        try:
            found[name] = program()
        except Exception as error:
            found[name] = {"raised": lines(f"{type(error).__name__}: {error}")}
    return found


# --- commands ---

SENTENCE_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "wizards")


def write_data() -> None:
    """Write a text, labelled sentences and instructions into this folder."""
    drawn = random.Random(0)
    sentences = [" ".join(drawn.choices(SENTENCE_WORDS, k=9)) for _ in range(300)]
    Path("text.txt").write_text(".\n".join(sentences), encoding="utf-8")
    for name, rows in (("train.csv", sentences[:60]), ("dev.csv", sentences[60:80])):
        table = ["text,label", *(f"{row},{'fox' if 'fox' in row else 'none'}" for row in rows)]
        Path(name).write_text("\n".join(table), encoding="utf-8")
    Path("new.txt").write_text("\n".join(sentences[80:83]), encoding="utf-8")
    pairs = [{"prompt": row[:3], "completion": row[4:8]} for row in sentences[:24]]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")


SHORT = {  # what a command below begins with
    "GPT": "train --config gpt-tiny --device cpu --n-layer 1 --n-embd 16 --n-head 2 "
    "--block-size 16 --batch-size 4 --warmup-steps 2 --eval-batches 2 --eval-every 2 "
    "--save-every 2 --data text.txt --tokenizer bytes --max-steps 4",
    "LM": "finetune lm --model hf --train pairs.jsonl --dev pairs.jsonl --max-length 16 "
    "--batch-size 4 --max-steps 4 --save-every 2 --eval-every 2 --device cpu",
    "CLASSIFY": "finetune classify --model scratch:tiny --train train.csv --dev dev.csv "
    "--max-length 16 --batch-size 12 --max-steps 4 --save-every 2 --eval-every 2 --device cpu",
}
COMMANDS = """
GPT --precision bf16-split --grad-accum 2 --output-dir split
GPT --precision bf16-mixed --output-dir mixed
GPT --precision bf16-mixed --max-steps 6 --output-dir mixed --resume
GPT --precision fp16-mixed,init_scale=4194304,growth_interval=1 --max-steps 8 --output-dir scaled
GPT --precision bf16-pure --lost-update-every 2 --max-steps 6 --output-dir pure
GPT --precision bf16-mixed --learning-rate 1e30 --output-dir nan
GPT --precision bf16-master --optimizer.name muon --output-dir muon
GPT --precision fp32 --tokenizer bpe:290 --output-dir bpe
GPT --output-dir mixed
GPT --data missing.txt
GPT --precision bf16-mixed,master=fp8
train --config nothing.toml
train --max-stps 3
export --run bpe --to hf --output hf
export --run nothing --to hf --output x
LM --precision bf16-mixed --output-dir lora
LM --precision bf16-split --lora-r 0 --output-dir full
LM --train train.csv
CLASSIFY --precision bf16-mixed --output-dir labels
CLASSIFY --train text.txt
generate --run mixed --prompt the --max-new-tokens 9 --seed 1
generate --run lora --prompt the --max-new-tokens 4 --temperature 0
predict --run labels --input new.txt --output new.jsonl
predict --run mixed --input new.txt
evaluate --run split --max-batches 2
evaluate --run labels
evaluate --run lora --json
explain bf16-split fp16-mixed mxfp8 --device cpu
explain bf16-mixed,reduce=x
memory split --precision fp32 bf16-split
trace split
trace mixed --precision bf16-master
report mixed split --out two.html
report nan --out nan.html
report scaled --out scaled.html
report pure --out pure.html
report nothing
"""


def command(text: str) -> Seen:
    """Run a command in this process, and tell how it ended and what it left."""
    first, *rest = text.split()
    words = [*SHORT.get(first, first).split(), *rest]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = halfstep_command(words)
    seen: Seen = {"exit": code, "stdout": lines(out.getvalue()), "stderr": lines(err.getvalue())}
    given = dict(itertools.pairwise(words))
    if "--output-dir" in given and (run := Path(given["--output-dir"])).is_dir():
        seen |= run_seen(run)
    for path in (Path(given[name]) for name in ("--out", "--output") if name in given):
        if path.is_file() and path.suffix != ".html":
            seen["file"] = lines(path.read_text(encoding="utf-8"))
        elif path.is_dir():
            seen["tensors"] = file_digests(path)
    return seen


def commands() -> Seen:
    """Run all commands in one folder: later ones read what earlier ones left."""
    write_data()
    texts = COMMANDS.strip().splitlines()
    return each({text: functools.partial(command, text) for text in texts})


def resumed() -> Seen:
    """Go on with the runs that v0.2-full left in the middle."""
    shutil.copytree(KEPT, ".", dirs_exist_ok=True)
    runs = {"gpt": "train", "lm": "finetune lm", "classify": "finetune classify"}
    return each(
        {
            run: functools.partial(command, f"{name} --resume --output-dir {run}")
            for run, name in runs.items()
        }
    )


# --- loops of one's own ---


class Net(nn.Module):
    """Predict a token from the one before, through a norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits."""
        hidden = self.tokens(ids)
        hidden = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return self.head(hidden)


def batches(count: int) -> list[Tensor]:
    """Draw tokens that a net can learn: each is the one before, times five, more or less."""
    generator = torch.Generator().manual_seed(1)
    firsts = torch.randint(64, (count, 16, 1), generator=generator)
    noise = torch.randint(3, (count, 16, 8), generator=generator)
    return [*((firsts * 5 ** torch.arange(8) + noise) % 64)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Compute the loss in fp32."""
    return cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def own_loop(
    policy: str,
    make: Callable[[nn.Module], Any] | None = None,
    spoil: dict[int, float] | None = None,
    **options: Any,
) -> Seen:
    """Train the net for eight steps of two micro-batches; ``spoil`` multiplies losses of steps."""
    torch.manual_seed(0)
    model = Net()
    make = make or (lambda model: halfstep.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer, steps = make(model), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            precision = halfstep.Precision(policy, model, optimizer, **options)
            drawn = iter(batches(16))
            for step in range(8):
                for _ in range(2):
                    with precision.autocast():
                        loss = loss_of(model, next(drawn)) / 2
                    precision.backward(loss * (spoil or {}).get(step, 1.0))
                steps.append(step_line(precision.step(max_norm=0.45)))  # some are clipped
        except halfstep.HalfstepError as error:
            steps += [type(error).__name__, *lines(str(error))]
    return {
        "steps": steps,
        "warnings": [str(one.message) for one in warned],
        "weights": digest(model.state_dict().values()),
        "optimizer": state_digests(optimizer),
    }


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make torch's own AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Make Muon for matrices, and AdamW for the rest."""
    groups = halfstep.optim.muon_groups(model)
    return halfstep.optim.Muon(groups, lr=1e-2, adjust_lr_fn="match_rms_adamw")


OVERFLOWING = "fp16-mixed,init_scale=16777216,growth_interval=2"
LOOPS: dict[str, Callable[[], Seen]] = {
    **{
        policy: functools.partial(own_loop, policy)
        for policy in (
            *("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-kahan", "bf16-sr"),
            *("bf16-pure", "fp16-master", "fp8,simulate=yes", "mxfp8,simulate=yes"),
            *("nvfp4,simulate=yes", "bf16-split,moments=8bit", "bf16-mixed,keep_fp32=head"),
            "bf16-mixed,moments=bf16",
        )
    },
    "torch's AdamW": lambda: own_loop("bf16-mixed", torch_adamw),
    "overflow": lambda: own_loop(OVERFLOWING, torch_adamw),
    "growth": lambda: own_loop("fp16-mixed,init_scale=1024,growth_interval=2"),
    "overflow, fp16 weights": lambda: own_loop("fp16-master,init_scale=16777216"),
    "Muon": lambda: own_loop("bf16-split", muon),
    "SGD": lambda: own_loop(
        "bf16-split", lambda model: halfstep.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ),
    "Lion": lambda: own_loop(
        "bf16-sr", lambda model: halfstep.optim.Lion(model.parameters(), lr=1e-3)
    ),
    "NaN stops": lambda: own_loop("bf16-mixed", spoil={3: math.nan}),
    "NaN is skipped": lambda: own_loop("bf16-split", spoil={3: math.nan}, on_nonfinite="skip:2"),
    "NaN too often": lambda: own_loop(
        "fp32", spoil={3: math.inf, 4: math.inf, 5: math.inf}, on_nonfinite="skip:2"
    ),
    "refused: optimizer": lambda: own_loop("bf16-split", torch_adamw),
    "fp16-pure": lambda: own_loop(
        "fp16-pure,init_scale=256",
        lambda model: halfstep.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
    ),
    "refused: field": lambda: own_loop("bf16-mixed,reduce=fp8"),
}


def loops() -> Seen:
    """Run every loop of one's own."""
    return each(LOOPS)


# --- GradScaler ---


def scaled_loop(optimizers: int = 1, spoil: tuple[int, ...] = (), **options: Any) -> Seen:
    """Train as torch's documents do, under fp16 autocast; ``spoil`` puts inf into gradients."""
    torch.manual_seed(0)
    model = Net()
    parts = [[*model.parameters()]] if optimizers == 1 else [[*model.head.parameters()]]
    if optimizers == 2:
        parts.append([p for p in model.parameters() if all(p is not q for q in parts[0])])
    each = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
    steps = []
    try:
        scaler = halfstep.GradScaler("cpu", **{"growth_interval": 2, **options})
        for step, ids in enumerate(batches(8)):
            for optimizer in each:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, ids)
            scaler.scale(loss).backward()
            if step in spoil:
                model.head.bias.grad[0] = math.inf
            for optimizer, part in zip(each, parts, strict=True):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(part, 0.45)
                scaler.step(optimizer)
            scaler.update()
            steps.append(f"loss {number(loss)} scale {scaler.get_scale():g}")
            if last := scaler.last_step:
                names = ", ".join(last.nonfinite_parameters)
                steps[-1] += f" {last.reason or 'applied'} {names}".rstrip()
        steps.append(f"{scaler.state_dict().get('scale')}")
    except halfstep.HalfstepError as error:
        steps += [type(error).__name__, *lines(str(error))]
    states = [state_digests(optimizer) for optimizer in each]
    return {"steps": steps, "weights": digest(model.state_dict().values()), "optimizer": states}


SCALERS: dict[str, Callable[[], Seen]] = {
    "torch's loop": scaled_loop,
    "overflows at first": lambda: scaled_loop(init_scale=2.0**30),
    "two optimizers": lambda: scaled_loop(2, spoil=(2, 5)),
    "strict": lambda: scaled_loop(spoil=(2, 3), strict=True),
    "off": lambda: scaled_loop(enabled=False),
}


def scalers() -> Seen:
    """Run every loop with a GradScaler."""
    return each(SCALERS)


# --- examples ---


def example(name: str, *arguments: Any) -> Seen:
    """Call the ``main`` of an example."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        left = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](*arguments)
    found = left[0] if isinstance(left, tuple) else left
    told = []
    if isinstance(found, list) and found:
        told = [number(one) if isinstance(one, float) else step_line(one) for one in found]
    return {"stdout": lines(out.getvalue()), "steps": thin(told)}


def examples() -> Seen:
    """Run the examples that need torch alone."""
    return each(
        {
            "minimal_loop": lambda: example("minimal_loop"),
            "minimal_loop fp16-mixed": lambda: example("minimal_loop", "fp16-mixed"),
            "distributed_loop": lambda: example("distributed_loop", "bf16-split"),
        }
    )


def engines() -> Seen:
    """Run the examples that need other people's engines."""
    return each(
        {
            "accelerate_loop": lambda: example("accelerate_loop"),
            "own_module": lambda: (
                example("own_module", "bf16-mixed", "own") | run_seen(Path("own"))
            ),
            "gpt2_lora": lambda: example("gpt2_lora"),
            "lightning_module": lambda: example("lightning_module", "bf16-master", 2),
            "transformers_trainer": lambda: example("transformers_trainer"),
        }
    )


# --- all of them ---

QUICK = {
    "commands": commands,
    "resumed": resumed,
    "loops": loops,
    "scalers": scalers,
    "examples": examples,
}
SLOW = {"engines": engines}


def run_all(names: Iterable[str]) -> Seen:
    """Run groups, each in an empty folder of its own."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found[name] = (QUICK | SLOW)[name]()
    return found


def record(names: list[str]) -> None:
    """Write down what groups do on this kind of CPU."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    recorded[kind()] = recorded.get(kind(), {}) | run_all(names)
    RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(words: list[str]) -> None:
    """Print or record what the named groups do, or all."""
    names = [word for word in words if not word.startswith("-")] or [*QUICK, *SLOW]
    if "--record" not in words:
        told = {"kind": kind(), **run_all(names)}
        sys.stdout.write(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
        return
    record(names)
    if "ATEN_CPU_CAPABILITY" not in os.environ:
        paths = [str(ROOT / "tests" / "without_bf16"), *os.environ.get("PYTHONPATH", "").split(":")]
        hidden = {**WITHOUT_BF16, "PYTHONPATH": ":".join(filter(None, paths))}
        subprocess.run([sys.executable, __file__, *words], env=os.environ | hidden, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
