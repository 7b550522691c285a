"""A GPT at a small learning rate: bf16 weights lose most updates, unless something keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from halfstep.diagnostics.lost_updates.meter import LostUpdateMeter
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, band, finish, note
from halfstep.lab.material import batches, gpt, train, validation
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.trainer.config.read import AtLeast1, Positive, Range

POLICIES = ("fp32", "bf16-pure", "bf16-split", "bf16-kahan", "bf16-sr")
LOOKS = {**COLOURS, "bf16-pure": COLOURS["bf16"]}
SEQUENCES, LENGTH, VALIDATED, LOOKED_AT = 8, 64, 32, 6


@dataclass(frozen=True)
class Options:
    """Learning rate and steps of each run, and how many seeds."""

    learning_rate: Positive = 2e-5
    steps: Annotated[int, Range("integers >= 2", lambda x: x >= 2)] = 60
    seeds: AtLeast1 = 3


def measure(options: Options) -> Data:
    """Of each policy the share of lost updates and the validation loss, every few steps."""
    return {
        "learning_rate": options.learning_rate,
        "policies": {
            policy: [_run(policy, options, seed) for seed in range(options.seeds)]
            for policy in POLICIES
        },
    }


def _run(policy: str, options: Options, seed: int) -> Data:
    """One training: the share of lost updates and the validation loss, at the same steps."""
    model = gpt(2, 128, LENGTH, seed)
    optimizer = AdamW(model.parameters(), lr=options.learning_rate, seed=seed)
    every = max(1, options.steps // LOOKED_AT)
    meters: list[LostUpdateMeter] = []
    found: Data = {"steps": [], "lost": [], "loss": []}

    def look(step: int, precision: Precision) -> None:
        if not meters:
            meters.append(LostUpdateMeter(precision, every, start=step))
        elif meters[0].fresh:
            (report,) = meters[0].report()
            found["steps"].append(step)
            found["lost"].append(report.lost)
            found["loss"].append(validation(precision, model, LENGTH, VALIDATED))

    data = batches(SEQUENCES, LENGTH, seed)
    train(policy, model, optimizer, data, options.steps, after=look)
    return found


def draw(figure: Any, data: Data, say: Say) -> None:
    """Above, the share of updates that are lost; below, the validation loss."""
    lost, loss = figure.subplots(2, 1, height_ratios=(1.0, 1.3), sharex=True)
    for policy in reversed(POLICIES):
        _draw_runs(lost, data, policy, "lost", 100.0)
        _draw_runs(loss, data, policy, "loss")
    steps = data["policies"]["fp32"][0]["steps"]
    most = {policy: max(_mean(data, policy, "lost")) for policy in POLICIES}
    kept = max(most[policy] for policy in POLICIES if policy != "bf16-pure")
    lost.set(ylim=(-4, 104), xlim=(0, steps[-1] * 1.02))
    last = steps[-1]
    ends = {policy: _mean(data, policy, "loss")[-1] for policy in POLICIES}

    def beside(axes: Any, text: str, at: tuple[float, float], policy: str, key: str) -> None:
        curve = _mean(data, policy, key)
        at_mean = len(steps) // 2
        to = (steps[at_mean], 100 * curve[at_mean]) if axes is lost else (last, curve[-1])
        note(axes, text, at, to, colour=LOOKS[policy], textcoords="axes fraction")

    text = say("pure_lost", lost=f"{fmean(_mean(data, 'bf16-pure', 'lost')):.0%}")
    beside(lost, text, (0.05, 0.4), "bf16-pure", "lost")
    text = say("others_lost", most=f"{kept:.1%}")
    beside(lost, text, (0.05, 0.13), "fp32", "lost")
    finish(lost, "", say("lost"))
    at_end = say("ends", step=last)
    text = f"{at_end}\nbf16-pure: {ends['bf16-pure']:.3f}"
    beside(loss, text, (0.6, 0.8), "bf16-pure", "loss")
    names = [name for name in POLICIES if name != "bf16-pure"]
    text = "\n".join([at_end, *(f"{name}: {ends[name]:.3f}" for name in names)])
    beside(loss, text, (0.04, 0.06), "fp32", "loss")
    rate = f"{data['learning_rate']:g}"
    finish(loss, say("step", rate=rate), say("loss", seeds=len(data["policies"]["fp32"])))


def _draw_runs(axes: Any, data: Data, policy: str, key: str, factor: float = 1.0) -> None:
    seeds = data["policies"][policy]
    runs = [[factor * value for value in run[key]] for run in seeds]
    style = {"fp32": (0, (3, 6)), "bf16-split": (4, (3, 6))}.get(policy, "-")
    band(axes, seeds[0]["steps"], runs, pale=0.15, color=LOOKS[policy], lw=2.4, ls=style)


def _mean(data: Data, policy: str, key: str) -> list[float]:
    runs = [run[key] for run in data["policies"][policy]]
    return [fmean(values) for values in zip(*runs, strict=True)]


def verdict(data: Data, say: Say) -> str:
    """How many updates were lost, and how far from fp32 each policy ended, on average."""
    exact = _mean(data, "fp32", "loss")[-1]
    behind = {
        policy.replace("-", "_"): f"{_mean(data, policy, 'loss')[-1] - exact:+.4f}"
        for policy in POLICIES[1:]
    }
    lost = f"{fmean(_mean(data, 'bf16-pure', 'lost')):.1%}"
    return say("verdict", rate=f"{data['learning_rate']:g}", lost=lost, exact=exact, **behind)


EXPERIMENT = Experiment("lost-updates", Options, measure, draw, verdict, size=(6.4, 7.4))
