"""Whole training loops side by side: every peer at its own best documented setting, and halfstep.

    python benchmarks/peers.py [--model gpt-14m] [--steps 20] [--threads 2] [--only ROW ...]

Each row is a process of its own that trains the same model on the same batches, and the processes
take their steps in turn: one runs, the others wait, so that a neighbour's load on the machine hits
all alike. A step is everything that the loop does between two optimizer steps: data, forward,
backward, clipping, update, metrics, callbacks. The first steps are not counted. Memory is the peak
resident size of the process; page faults are those of a step.

The peers' model is theirs: a GPT written as its readers know it, with torch's own attention,
activations and loss (or a model of transformers). No part of halfstep is in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WARM_UP = 3
RATE, BETAS, DECAY, NORM = 1e-3, (0.9, 0.95), 0.1, 1.0
# glibc's knobs for memory that is freed and taken again each step, as its manual page has them
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
         "MALLOC_TOP_PAD_": str(1 << 26)}  # fmt: skip
MODELS = {
    "gpt-14m": dict(n_layer=6, n_head=6, n_embd=384, vocab_size=8192, rows=8, length=256),
    "gpt2-124m": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, rows=2, length=512),
    "tiny": dict(n_layer=2, n_head=2, n_embd=64, vocab_size=256, rows=4, length=64),
}


# --- the peers' model and data --------------------------------------------------------------------


class Attention(nn.Module):  # noqa: D101
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):  # noqa: D101
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), Attention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 as the small repositories write it: tied head, all logits, torch's cross-entropy."""

    def __init__(self, n_layer, n_head, n_embd, vocab_size, length, **_: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(length, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if name.endswith(("c_proj.weight", "mlp.2.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
            elif p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, input_ids, labels=None):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return {"loss": loss}


class Tokens(Dataset):
    """Sequences of a chain in which each token has 16 followers: there is something to learn."""

    def __init__(self, count: int, vocab_size: int, length: int, **_: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        followers = torch.randint(vocab_size, (vocab_size, 16), generator=generator)
        draws = torch.randint(16, (length, count), generator=generator)
        now = torch.randint(vocab_size, (count,), generator=generator)
        columns = [now]
        for draw in draws:
            now = followers[now, draw]
            columns.append(now)
        self.tokens = torch.stack(columns, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        row = self.tokens[at]
        return {"input_ids": row[:-1], "labels": row[1:]}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    ps = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in ps if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in ps if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(model), lr=RATE, betas=BETAS, fused=True)


# --- a row's process ------------------------------------------------------------------------------


class Turn:
    """Waits for the parent before each step, and tells it what the last one was."""

    def __init__(self) -> None:
        self._said = os.fdopen(os.dup(1), "w")  # what libraries print goes elsewhere
        os.dup2(2, 1)
        self._started: float | None = None

    def next(self, loss: float | None = None) -> None:
        """Between two steps; ``loss`` is the last one's."""
        seconds = None if self._started is None else time.perf_counter() - self._started
        usage = resource.getrusage(resource.RUSAGE_SELF)
        line = {
            "seconds": seconds,
            "loss": loss,
            "peak": usage.ru_maxrss,
            "faults": usage.ru_minflt,
        }
        self._said.write(json.dumps(line) + "\n")
        self._said.flush()
        if not sys.stdin.readline():
            os._exit(0)
        self._started = time.perf_counter()


def loader(shape: dict[str, int], steps: int) -> DataLoader:
    return DataLoader(Tokens(shape["rows"] * steps, **shape), batch_size=shape["rows"])


def bare(shape: dict, turn: Turn, steps: int, *, low: bool = True, compiled: bool = False) -> None:
    model = GPT(**shape)
    optimizer = adamw(model)
    run = torch.compile(model) if compiled else model
    loss = None
    for batch in loader(shape, steps):
        turn.next(loss)
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            out = run(**batch)["loss"]
        out.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = out.item()
    turn.next(loss)


def accelerate(shape: dict, turn: Turn, steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = GPT(**shape)
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(shape, steps))
    loss = None
    for batch in batches:
        turn.next(loss)
        out = model(**batch)["loss"]
        accelerator.backward(out)
        accelerator.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss = out.item()
    turn.next(loss)


def fabric(shape: dict, turn: Turn, steps: int) -> None:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = GPT(**shape)
    model, optimizer = runner.setup(model, adamw(model))
    loss = None
    for batch in runner.setup_dataloaders(loader(shape, steps)):
        turn.next(loss)
        out = model(**batch)["loss"]
        runner.backward(out)
        runner.clip_gradients(model, optimizer, max_norm=NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss = out.item()
    turn.next(loss)


def lightning(shape: dict, turn: Turn, steps: int) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(**shape)
            self.last = None

        def training_step(self, batch, _):
            loss = self.model(**batch)["loss"]
            self.last = loss.detach()
            return loss

        def on_train_batch_start(self, *_) -> None:
            turn.next(None if self.last is None else self.last.item())

        def configure_optimizers(self):
            # Lightning refuses a fused optimizer together with clipping
            return torch.optim.AdamW(groups(self), lr=RATE, betas=BETAS)

    module = Module()
    L.Trainer(
        accelerator="cpu", devices=1, precision="bf16-mixed", max_steps=steps, logger=False,
        gradient_clip_val=NORM, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader(shape, steps))  # fmt: skip
    turn.next(module.last.item())


def transformers(shape: dict, turn: Turn, steps: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Gate(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            turn.next()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=shape["rows"], bf16=True,
            use_cpu=True, learning_rate=RATE, adam_beta2=BETAS[1], weight_decay=DECAY,
            max_grad_norm=NORM, lr_scheduler_type="constant", report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=steps, optim="adamw_torch_fused",
        )  # fmt: skip
        data = Tokens(shape["rows"] * steps, **shape)
        trainer = Trainer(GPT(**shape), arguments, train_dataset=data, callbacks=[Gate()])
        trainer.train()
        turn.next(trainer.state.log_history[-1].get("train_loss"))


def own_loop(shape: dict, turn: Turn, steps: int, *, policy: str) -> None:
    """halfstep.Precision around the peers' model: four changed lines."""
    import halfstep

    model = GPT(**shape)
    split = policy.startswith("bf16-split")
    optimizer = halfstep.optim.AdamW(groups(model), lr=RATE, betas=BETAS) if split else adamw(model)
    precision = halfstep.Precision(policy, model, optimizer)
    loss = None
    for batch in loader(shape, steps):
        turn.next(loss)
        with precision.autocast():
            out = model(**batch)["loss"]
        loss = precision.step(out, max_norm=NORM).loss
    turn.next(loss)


def trainer(shape: dict, turn: Turn, steps: int, *, policy: str) -> None:
    """halfstep.Trainer around the peers' model, with its metrics and its meter."""
    import halfstep

    class Wait:
        def __init__(self) -> None:
            turn.next()

        def __call__(self, tick: Any) -> None:
            turn.next(tick.record.loss)

    with tempfile.TemporaryDirectory() as folder:
        wait = Wait()
        halfstep.Trainer(
            GPT(**shape),
            Tokens(shape["rows"] * steps, **shape),
            lambda model, batch: model(**batch)["loss"],
            precision=policy,
            optimizer="adamw",
            schedule="constant",
            learning_rate=RATE,
            weight_decay=DECAY,
            max_norm=NORM,
            batch_size=shape["rows"],
            max_steps=steps,
            output_dir=f"{folder}/run",
            callbacks=[wait],
        ).train()


def command(
    shape: dict, turn: Turn, steps: int, *, policy: str, words: tuple[str, ...] = ()
) -> None:
    """`halfstep train` with its own GPT of the same shape, all that the command does."""
    import halfstep.trainer.run as execute
    from halfstep.cli.main import main

    def in_turn(session: Any, path: Path) -> Iterator[Any]:
        turn.next()
        for tick in original(session, path):
            turn.next(tick.record.loss)
            yield tick

    original, execute.train = execute.train, in_turn
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(_text(1200 * shape["vocab_size"]), encoding="utf-8")
        options = {
            "data": text, "output-dir": f"{folder}/run", "precision": policy,
            "tokenizer": f"bpe:{shape['vocab_size']}", "n-layer": shape["n_layer"],
            "n-head": shape["n_head"], "n-embd": shape["n_embd"],
            "model.block-size": shape["length"], "run.block-size": shape["length"],
            "batch-size": shape["rows"], "max-steps": steps, "learning-rate": RATE, "seed": 0,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in options.items()]
        main(["train", "--quiet", *given, *words])


def _text(limit: int) -> str:
    """Source text of the standard library, and of torch after it, of about so many characters."""
    found, size = [], 0
    for folder in (Path(os.__file__).parent, Path(torch.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            if size > limit or "site-packages" in path.relative_to(folder).parts:
                continue
            found.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(found[-1])
    return "\n".join(found)


Row = tuple[Callable[..., None], dict[str, Any], dict[str, str]]
ROWS: dict[str, Row] = {
    "bare fp32": (bare, {"low": False}, {}),
    "bare autocast": (bare, {}, {}),
    "bare autocast, tuned malloc": (bare, {}, TUNED),
    "bare autocast, compiled, tuned malloc": (bare, {"compiled": True}, TUNED),
    "Accelerate": (accelerate, {}, {}),
    "Lightning": (lightning, {}, {}),
    "Fabric": (fabric, {}, {}),
    "Transformers Trainer": (transformers, {}, {}),
    "halfstep.Precision bf16-mixed, their model": (own_loop, {"policy": "bf16-mixed"}, {}),
    "halfstep.Precision bf16-mixed, their model, tuned malloc": (
        own_loop, {"policy": "bf16-mixed"}, TUNED,
    ),
    "halfstep.Trainer bf16-mixed, their model": (trainer, {"policy": "bf16-mixed"}, {}),
    "halfstep train bf16-mixed": (command, {"policy": "bf16-mixed"}, {}),
    "halfstep train bf16-split, 8-bit moments": (
        command, {"policy": "bf16-split,moments=8bit"}, {},
    ),
}  # fmt: skip


class Process:
    """A row at work."""

    def __init__(self, name: str, model: str, steps: int, threads: int) -> None:
        words = [sys.executable, __file__, "--row", name, "--model", model, "--steps", str(steps)]
        environment = {**os.environ, **ROWS[name][2], "OMP_NUM_THREADS": str(threads)}
        self.name, self.steps = name, []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment,
        )  # fmt: skip
        self._read()

    def step(self) -> None:
        """Have it take one step, and wait."""
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        self.steps.append(self._read())

    def _read(self) -> dict[str, Any]:
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended early:\n{self._log.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.wait()


def measure(names: list[str], model: str, steps: int, threads: int) -> dict[str, dict[str, Any]]:
    """Every row's steps, taken in turn."""
    rows: list[Process] = []
    try:
        for name in names:
            rows.append(Process(name, model, WARM_UP + steps + 1, threads))
            rows[-1].step()  # compiles, allocates
            print(f"  ready: {name}", file=sys.stderr, flush=True)
        for _ in range(WARM_UP - 1 + steps):
            for row in rows:
                row.step()
        shape = MODELS[model]
        return {row.name: _figures(row.steps, shape["rows"] * shape["length"]) for row in rows}
    finally:
        for row in rows:
            row.close()


def _figures(steps: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    counted = steps[WARM_UP:]
    seconds = sorted(step["seconds"] for step in counted)
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    return {
        "tokens_per_second": tokens / median(seconds),
        "best_tokens_per_second": tokens / seconds[0],
        "quartiles": [tokens / seconds[len(seconds) * 3 // 4], tokens / seconds[len(seconds) // 4]],
        "peak_mb": counted[-1]["peak"] / 1024,
        "faults_a_step": (counted[-1]["faults"] - steps[WARM_UP - 1]["faults"]) / len(counted),
        "last_loss": losses[-1] if losses else None,
        "samples": len(counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt-14m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        work, options, _ = ROWS[arguments.row]
        turn = Turn()
        work(MODELS[arguments.model], turn, arguments.steps, **options)
        turn.next()
        return
    found = measure(arguments.only, arguments.model, arguments.steps, arguments.threads)
    theirs = [f["tokens_per_second"] for name, f in found.items() if not name.startswith("half")]
    best = max(theirs, default=math.nan)
    print(f"{arguments.model}, {arguments.threads} threads, {arguments.steps} steps each\n")
    head = ("tokens/s", "best", "of the best peer", "peak MB", "faults")
    print(f"{'':<56} {head[0]:>9} {head[1]:>7} {head[2]:>17} {head[3]:>8} {head[4]:>8}")
    for name, f in found.items():
        print(
            f"{name:<56} {f['tokens_per_second']:>9,.0f} {f['best_tokens_per_second']:>7,.0f} "
            f"{f['tokens_per_second'] / best:>17.2f} {f['peak_mb']:>8,.0f} "
            f"{f['faults_a_step']:>8,.0f}"
        )
    if not arguments.no_save:
        from common import save

        results = {"model": arguments.model, "threads": arguments.threads, "rows": found}
        print(f"\nwritten: {save(f'peers-{arguments.model}', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
