"""Tries `halfstep.advise` on models whose sensitive layers are known; a killed run goes on.

    python benchmarks/advise.py [--models 20]

Each model is a residual network of eight like blocks that has learnt its data up to noise. Three of
its linear layers see outliers in one channel of 16, which NVFP4 cannot hold beside the others, with
weights as much smaller. What the advice is worth is judged by runs on seeds that it never saw: a
policy holds where its mean gap stays within the tolerance. All 256 policies that give each layer
bf16 or NVFP4 are searched for the cheapest that holds, the cheap ones first: dearer ones need no
run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from common import RESULTS
from halfstep.diagnostics.advise.choice import RATES
from halfstep.diagnostics.advise.layers import policy_of
from halfstep.diagnostics.advise.proof import Trials
from halfstep.files import write_whole
from halfstep.precision.policy.recipe import PRODUCTS
from halfstep.trainer.environment import environment

WIDTH, BLOCKS, PLANTED = 64, 8, 3
OUTLIER, NOISE = 30.0, 0.5
TOKENS, BATCHES, RATE = 16, 6, 1e-3
STEPS, TOLERANCE = 24, 0.05
LONG, LONG_MODELS = 192, 2  # runs that show whether a layer matters in the end, and of how many
FRESH = range(1000, 1005)
RESULT = RESULTS / "advise.json"


class Block(nn.Module):
    """``x + gelu(linear(scale * norm(x))) / 2``, with a scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (tokens, WIDTH) to such."""
        return x + 0.5 * F.gelu(self.linear(self.norm(x) * self.scale))


def planted(seed: int) -> tuple[nn.Module, list[int], list[tuple[Tensor, Tensor]]]:
    """A model, the numbers of its sensitive blocks, and batches of inputs and targets."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    xs = [torch.randn(TOKENS, WIDTH) for _ in range(BATCHES)]
    with torch.no_grad():
        batches = [(x, model(x) + NOISE * torch.randn(TOKENS, WIDTH)) for x in xs]
    sensitive = sorted(torch.randperm(BLOCKS)[:PLANTED].tolist())
    for number in sensitive:
        block = model[number]
        outliers = torch.arange(0, WIDTH, 16) + torch.randint(0, 16, (WIDTH // 16,))
        block.scale[outliers] = OUTLIER
        with torch.no_grad():
            block.linear.weight.div_(block.scale)  # the same function
    return model, sensitive, batches


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


class Truth:
    """What policies of a model really cost its loss, on fresh seeds."""

    def __init__(self, model: nn.Module, batches: Any, steps: int = STEPS) -> None:
        self.trials = Trials(model, batches, loss_fn, adamw, "bf16-mixed", steps, FRESH)

    def gaps(self, policy: str, seeds: Any = FRESH) -> list[float]:
        """How much higher the loss of each seed is than that of bf16, relative."""
        return [self.trials.gap_on(seed, policy) for seed in seeds]

    def holds(self, kept: tuple[int, ...]) -> bool:
        """Whether a policy holds on two fresh seeds; a seed far beyond the tolerance is enough."""
        policy = keeping(kept)
        first = self.gaps(policy, FRESH[:1])
        if first[0] > 2 * TOLERANCE:
            return False
        return fmean(first + self.gaps(policy, FRESH[1:2])) <= TOLERANCE


def keeping(kept: tuple[int, ...]) -> str:
    """The policy with some blocks in bf16 and the others in NVFP4."""
    low = [f"{number}.linear" for number in range(BLOCKS) if number not in kept]
    return policy_of({(name, product): "nvfp4" for name in low for product in PRODUCTS}, "bf16")


def cost(kept: int) -> float:
    """Time of the linear layers relative to bf16."""
    return (kept + (BLOCKS - kept) / RATES["b200"]["nvfp4"]) / BLOCKS


def best(seed: int) -> dict[str, Any]:
    """The cheapest of all 256 policies that holds; layers are alike, so few kept ones are cheap."""
    model, _, batches = planted(seed)
    truth, runs = Truth(model, batches), 0
    for count in range(BLOCKS + 1):
        for kept in itertools.combinations(range(BLOCKS), count):
            runs += 1
            if truth.holds(kept):
                return {"kept": kept, "cost": cost(count), "policies_run": runs}
    raise AssertionError("the reference holds")


def advised(seed: int, tolerance: float) -> dict[str, Any]:
    model, sensitive, batches = planted(seed)
    began = time.process_time()
    found = halfstep.advise(
        model, batches, loss_fn, ("bf16", "nvfp4"), tolerance, steps=STEPS, optimizer=adamw
    )
    seconds = time.process_time() - began
    return {
        "sensitive": sensitive, "tolerance": tolerance, "proved": found.proved,
        "floor": found.floor, "seconds": seconds,
        "named": sorted(int(name.split(".")[0]) for name in found.exceptions),
        "mean": found.gap and found.gap.mean, "bound": found.gap and found.gap.bound,
        "cost": 1 - found.saved, "fresh": Truth(model, batches).gaps(found.policy),
        "policy": found.policy,
    }  # fmt: skip


def advice(seed: int) -> dict[str, Any]:
    return advised(seed, TOLERANCE)


def drawn(seed: int) -> dict[str, Any]:
    return advised(seed, math.exp(random.Random(seed).uniform(math.log(0.01), math.log(0.2))))


def alone(seed: int) -> dict[str, Any]:
    """How much higher the loss is after many steps where one layer alone is in NVFP4."""
    model, sensitive, batches = planted(seed)
    truth = Truth(model, batches, LONG)
    every = range(BLOCKS)
    gaps = [truth.gaps(keeping(tuple({*every} - {n})), FRESH[:1])[0] for n in every]
    return {"sensitive": sensitive, "gaps": gaps}


def table(content: dict[str, Any]) -> str:
    """The figures as the table of docs/advise.md."""
    found = content["advice"]
    named = sum(a["named"] == a["sensitive"] for a in found.values())
    searched = content["best"].items()
    cheap = sum(found[seed]["cost"] <= 1.05 * least["cost"] for seed, least in searched)
    rows = [
        ("exactly the three sensitive layers named", f"{named} of {len(found)}"),
        ("cost at most 5 % above that of the cheapest of 256 policies that holds",
         f"{cheap} of {len(searched)}"),
    ]  # fmt: skip
    for key, words in (("advice", f"tolerance of {100 * TOLERANCE:.0f} %"),
                       ("drawn", "tolerance drawn between 1 % and 20 %")):  # fmt: skip
        proved = [a for a in content[key].values() if a["proved"]]
        held = sum(fmean(a["fresh"]) <= a["tolerance"] for a in proved)
        runs = [gap <= a["tolerance"] for a in proved for gap in a["fresh"]]
        rows += [
            (f"{words}: proved", f"{len(proved)} of {len(content[key])}"),
            (f"{words}: held by the mean of five fresh seeds", f"{held} of {len(proved)}"),
            (f"{words}: held by a single fresh run", f"{sum(runs)} of {len(runs)}"),
        ]
    parts: dict[bool, list[float]] = {True: [], False: []}
    for seen in content["alone"].values():
        for number, gap in enumerate(seen["gaps"]):
            parts[number in seen["sensitive"]].append(gap)
    for which, name in ((True, "a sensitive layer"), (False, "another layer")):
        shown = f"{100 * min(parts[which]):+.1f} % to {100 * max(parts[which]):+.1f} %"
        rows.append((f"loss after {LONG} steps with {name} alone in NVFP4", shown))
    return "| | found |\n|---|---|\n" + "".join(f"| {what} | {found} |\n" for what, found in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    arguments = parser.parse_args()
    content = json.loads(RESULT.read_text()) if RESULT.exists() else {"benchmark": "advise"}
    content.setdefault("machine", environment(torch.device("cpu")))
    for work in (advice, best, alone, drawn):
        found = content.setdefault(work.__name__, {})
        for seed in range(LONG_MODELS if work is alone else arguments.models):
            if str(seed) not in found:
                found[str(seed)] = work(seed)
                write_whole(RESULT, json.dumps(content, indent=1) + "\n")
                print(work.__name__, seed, json.dumps(found[str(seed)]), flush=True)
    print(table(content), end="")


if __name__ == "__main__":
    main()
