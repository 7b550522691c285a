"""The tail of a step on one GPU: unscale, check, clip and AdamW over the tensors of GPT-2.

    python benchmarks/optimizer_cuda.py [--configs gpt2 gpt2-large] [--rounds 15] [--no-training]

Ours is the step that Precision takes on CUDA, with AdamW over bf16 weights and their exact fp32
masters; torch's is GradScaler, clip_grad_norm_ and fused AdamW over fp32. Variants are interleaved;
a sample is the mean of ten steps in a row, between CUDA events. The share is that of the bandwidth
of a large copy, measured in the same run: bytes that a step must read and write, over its time.

The second part trains GPT-2 124M under fp16 autocast with and without dynamic loss scaling.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common import save, summary
from halfstep.optim.kernels.dispatch import kernel_for
from halfstep.optim.optimizers import AdamW
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.loss_scale import LossScaleConfig
from halfstep.precision.step import Precision
from halfstep.trainer.config.config import load_config
from halfstep.trainer.models.gpt.gpt import GPT

VOCABULARY = 50304  # 50257 rounded up to a multiple of 64, as GPT-2 training codes do
REPEATS = 10
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 1 / 128}
SCALE = LossScaleConfig(kind="dynamic", init_scale=1.0, growth_interval=10**9)
CLIP = 1e9  # costs the same as one that bites, and leaves the gradients as they are
Step = Callable[[], object]


def shapes(config: str) -> list[torch.Size]:
    with torch.device("meta"):
        model = GPT(load_config(config, [("model.vocab_size", VOCABULARY)]).model, seed=0)
    return [p.shape for p in model.parameters()]


def parameters(sizes: list[torch.Size], dtype: torch.dtype) -> list[nn.Parameter]:
    """Weights with gradients of the same dtype, as wide as those of GPT-2."""
    made = []
    for size in sizes:
        weight = torch.empty(size, device="cuda", dtype=dtype).normal_(std=0.02)
        made.append(nn.Parameter(weight))
        made[-1].grad = torch.empty_like(weight).normal_(std=1e-3)
    return made


def ours(sizes: list[torch.Size], update: str, moments: str) -> tuple[Step, float]:
    """One step, and the bytes per element that it must move."""
    held = parameters(sizes, torch.bfloat16)
    optimizer = AdamW(held, lr=1e-4, update=update, moments=moments)  # type: ignore[arg-type]
    steps = optimizer.device_step(SCALE)
    assert steps is not None, "a GPU with Triton"
    gradients = {p: p.grad for p in held if p.grad is not None}
    loss = torch.zeros((), device="cuda")

    def step() -> None:
        steps.takes(gradients)
        steps.examine(loss, gradients, CLIP)
        optimizer.step(gradients=gradients, multiplier=steps)
        if not steps.is_capturing():
            steps.decision()

    beside = {"split": 2, "split24": 1}[update]
    # gradients are read twice; weights, remainders and two moments are read and written
    return step, 2 * 2 + 2 * (2 + beside + 2 * MOMENT_BYTES[moments])


def graphed(step: Step) -> Step:
    """The same step from a CUDA graph: what is left when the host costs nothing."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def torch_amp(sizes: list[torch.Size]) -> tuple[Step, float]:
    held = parameters(sizes, torch.float32)
    optimizer = torch.optim.AdamW(held, lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.zeros((), device="cuda"))

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(held, CLIP)
        scaler.step(optimizer)
        scaler.update()

    # unscaling reads and writes gradients, clipping reads twice and writes once, AdamW moves 28
    return step, 8 + 12 + 28


def peer(sizes: list[torch.Size], module: str, name: str, **options: object) -> tuple[Step, float]:
    """Another package's optimizer over bf16, with torch's clipping; it has no scaler."""
    held = parameters(sizes, torch.bfloat16)
    optimizer = getattr(importlib.import_module(module), name)(held, lr=1e-4, **options)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(held, CLIP)
        optimizer.step()

    return step, float("nan")


def seconds(step: Step) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPEATS


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))
    return times


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    fastest = min(interleaved({"copy": lambda: target.copy_(source)}, 5)["copy"])
    return 2 * source.numel() / fastest


def tail(config: str, rounds: int, bandwidth: float) -> dict[str, dict[str, float]]:
    sizes = shapes(config)
    count = sum(size.numel() for size in sizes)
    makers: dict[str, Callable[[], tuple[Step, float]]] = {
        f"ours {update} {moments}": (lambda u=update, m=moments: ours(sizes, u, m))
        for update, moments in (
            ("split", "fp32"),
            ("split", "bf16"),
            ("split", "8bit"),
            ("split24", "8bit"),
        )
    }
    makers["torch GradScaler, clip, fused"] = lambda: torch_amp(sizes)
    makers["optimi Kahan, clip"] = lambda: peer(sizes, "optimi", "AdamW", kahan_sum=True)
    makers["flashoptim, clip"] = lambda: peer(sizes, "flashoptim", "FlashAdamW")
    steps, moved = {}, {}
    for name, make in makers.items():
        try:
            steps[name], moved[name] = make()
        except ImportError as error:
            print(f"{config}: {name} left out: {error}")
            continue
        if name.startswith("ours"):
            steps[f"{name}, graph"], moved[f"{name}, graph"] = graphed(steps[name]), moved[name]
    rows = {}
    base = "torch GradScaler, clip, fused"
    times = interleaved(steps, rounds)
    print(f"\n{config}: {count / 1e6:.0f} M elements in {len(sizes)} tensors")
    print(f"{'variant':<34} {'ms':>8} {'of torch':>9} {'of copy':>8}")
    for name, found in times.items():
        row = summary(found)
        row["bytes_per_element"] = moved[name]
        row["copy_share"] = moved[name] * count / row["median_seconds"] / bandwidth
        row["time_of_torch"] = row["median_seconds"] / summary(times[base])["median_seconds"]
        rows[name] = row
        print(
            f"{name:<34} {row['median_seconds'] * 1e3:>8.3f} {row['time_of_torch']:>9.2f} "
            f"{row['copy_share']:>8.1%}"
        )
    return rows


def training(rounds: int) -> dict[str, dict[str, float]]:
    """Step times of GPT-2 124M under fp16 autocast: no scaling, ours, torch's."""
    config = load_config("gpt2", [("model.vocab_size", VOCABULARY)])
    tokens = torch.randint(VOCABULARY, (8, config.block_size + 1), device="cuda")
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def forward(model: GPT) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            total, count = model.loss_sum(batch)
            return total / count

    def build(kind: str) -> Step:
        model = GPT(config.model, seed=0).to("cuda")
        held = list(model.parameters())
        if kind == "torch GradScaler":
            fused = torch.optim.AdamW(held, lr=1e-5, fused=True)
            amp = torch.amp.GradScaler("cuda")

            def step() -> None:
                amp.scale(forward(model)).backward()
                amp.unscale_(fused)
                torch.nn.utils.clip_grad_norm_(held, 1.0)
                amp.step(fused)
                amp.update()
                fused.zero_grad(set_to_none=True)

            return step
        optimizer = AdamW(held, lr=1e-5, moments="fp32")

        def bare() -> None:
            forward(model).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if kind == "no scaling, no check":
            return bare
        scale = "none" if kind == "ours, none" else "dynamic"
        precision = Precision(f"fp16-mixed,scale={scale}", model, optimizer)

        def checked(*batch: Tensor) -> StepResult:
            with precision.autocast():
                total, count = model.loss_sum(batch)
                loss = total / count
            return precision.step(loss, max_norm=1.0)

        take = precision.captured(checked) if kind == "ours, dynamic, captured" else checked
        return lambda: take(*batch)

    kinds = (
        *("no scaling, no check", "ours, none", "ours, dynamic", "ours, dynamic, captured"),
        "torch GradScaler",
    )
    times = interleaved({kind: build(kind) for kind in kinds}, rounds)
    base = summary(times[kinds[0]])["median_seconds"]
    print(f"\nGPT-2 124M, fp16 autocast, 8 x {config.block_size} tokens")
    rows = {}
    for kind, found in times.items():
        rows[kind] = {**summary(found), "of_unscaled": summary(found)["median_seconds"] / base}
        print(
            f"{kind:<34} {rows[kind]['median_seconds'] * 1e3:>8.2f} ms "
            f"{rows[kind]['of_unscaled']:.4f} of no scaling"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", nargs="+", default=["gpt2", "gpt2-large"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-training", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("optimizer_cuda: torch sees no CUDA device")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}; kernel: {kernel_for(device.type).name}")
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s read and written")
    results = {"copy_bytes_per_second": bandwidth, "kernel": kernel_for(device.type).name}
    for config in arguments.configs:
        results[config] = tail(config, arguments.rounds, bandwidth)
        torch.cuda.empty_cache()
    if not arguments.no_training:
        results["training"] = training(arguments.rounds)
    print(f"written: {save('optimizer-cuda', results, device)}")


if __name__ == "__main__":
    main()
