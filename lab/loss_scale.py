# %% [markdown] lang="en"
# # One GPT, two batch sizes, with and without a loss scale
#
# When does fp16 need a loss scale, and does it matter which?
#
# The large batch is one micro-batch whose loss is divided as if it were one of many, and whose finished gradients are multiplied by as many: forward
# and backward compute what they would within such a batch.

# %% [markdown] lang="zh"
# # 同一个 GPT、两种批次，有无损失缩放
#
# fp16 什么时候需要损失缩放？静态还是动态有区别吗？
#
# 大批次是一个微批次：它的损失按许多个微批次来平均，得到的梯度再乘以同样的倍数，因此前向和反向计算的就是在那样一个大批次中所计算的。

# %%
from statistics import fmean

import torch

from course import BLACK, BLUE, GREEN, ORANGE, Lab, Transformer, batches
from halfstep import Precision
from halfstep.optim import AdamW

lab = Lab("loss_scale")
MICRO_BATCHES, GROWTH, SEEDS, STEPS = (2048, 1, 1, 11) if lab.quick else (2048, 5, 2, 60)
SEQUENCES, LENGTH = (2, 16) if lab.quick else (8, 32)
POLICIES = {
    "fp32": "fp32",
    "none": "compute=fp16,scale=static,init_scale=1",
    "static": "compute=fp16,scale=static,init_scale=65536",
    "dynamic": f"compute=fp16,scale=dynamic,growth_interval={GROWTH}",
}


# %%
def train(policy, seed, share):
    """Losses, loss scales and skipped steps of a run whose batch is one of ``share``."""
    model = (
        Transformer(1, 32, LENGTH, seed=seed)
        if lab.quick
        else Transformer(2, 64, LENGTH, seed=seed)
    )
    data, losses, scales, skipped = batches(SEQUENCES, LENGTH, seed), [], [], []
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with Precision(policy, model, optimizer, on_nonfinite="skip:1000") as precision:
        for step in range(1, STEPS + 1):
            with precision.autocast():
                loss = model.loss(next(data))
            precision.backward(loss / share)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad *= share
            result = precision.step(max_norm=1.0)
            losses.append(share * result.loss)
            scales.append(result.loss_scale)
            if not result.applied:
                skipped.append(step)
    return {"losses": losses, "scales": scales, "skipped": skipped}


runs = {}
for tokens, share in ((SEQUENCES * LENGTH * n, n) for n in (1, MICRO_BATCHES)):
    for name, policy in POLICIES.items():
        lab.tell(f"{tokens:,} tokens a batch, {name} ...", f"每批 {tokens:,} 个词元，{name}……")
        runs[tokens, name] = [train(policy, seed, share) for seed in range(SEEDS)]

# %%
small, large = sorted({tokens for tokens, _ in runs})
end = {key: fmean(fmean(run["losses"][-10:]) for run in found) for key, found in runs.items()}
far = {key: end[key] - end[small, "fp32"] for key in end}
skips = {tokens: runs[tokens, "dynamic"][0]["skipped"] for tokens in (small, large)}
head = lab.say("loss scale,small batch,large batch", "损失缩放,小批次,大批次").split(",")
lab.table(
    head, *((name, f"{end[small, name]:.3f}", f"{end[large, name]:.3f}") for name in POLICIES)
)
lab.finding(
    "The final loss differs from that of fp32 "
    + "; ".join(
        f"at {t:,} tokens a batch by {far[t, 'none']:+.3f} without a scale, {far[t, 'static']:+.3f} "
        f"with a static and {far[t, 'dynamic']:+.3f} with a dynamic one"
        for t in (small, large)
    )
    + ".",
    "最终损失与 fp32 之差："
    + "；".join(
        f"每批 {t:,} 个词元时，无缩放 {far[t, 'none']:+.3f}、静态 {far[t, 'static']:+.3f}、"
        f"动态 {far[t, 'dynamic']:+.3f}"
        for t in (small, large)
    )
    + "。",
    growth=GROWTH,
    far={f"{tokens} {name}": value for (tokens, name), value in far.items()},
    dynamic=[runs[tokens, "dynamic"][0] for tokens in (small, large)],
)


# %%
def draw(figure):
    *panels, trace = figure.subplots(3)
    looks = {"none": (ORANGE, 2), "static": (GREEN, 4), "dynamic": (BLUE, 2), "fp32": (BLACK, 1)}
    at = range(1, STEPS + 1)
    for axes, tokens in zip(panels, (small, large), strict=True):
        for name, (colour, wide) in looks.items():
            mean = torch.tensor([run["losses"] for run in runs[tokens, name]]).mean(0)
            said = {"none": lab.say("fp16, no scale", "fp16，无缩放"), "fp32": "fp32"}
            said["static"] = lab.say("fp16, static scale", "fp16，静态缩放")
            said["dynamic"] = lab.say("fp16, dynamic scale", "fp16，动态缩放")
            axes.plot(
                at, mean, color=colour, lw=wide, label=f"{said[name]}: {end[tokens, name]:.2f}"
            )
        text = f"loss at {tokens:,} tokens a batch", f"损失，每批 {tokens:,} 个词元"
        axes.set_title(lab.say(*text))
        axes.legend(fontsize=10)
    for tokens, style in ((small, "--"), (large, "-")):
        run = runs[tokens, "dynamic"][0]
        label = lab.say(f"{tokens:,} tokens", f"{tokens:,} 个词元")
        trace.step(at, run["scales"], style, where="mid", color=BLUE, label=label)
        there = [run["scales"][step - 1] for step in run["skipped"]]
        trace.plot(run["skipped"], there, "x", color=BLACK, ms=9, mew=2.4)
    trace.set_yscale("log", base=2)
    text = "dynamic scale (x: overflow, step skipped)", "动态缩放（x：溢出，跳过这一步）"
    trace.set(title=lab.say(*text), xlabel=lab.say("step", "步"))
    trace.legend()


lab.figure(draw, 6.4, 8.4)

# %% [markdown] lang="en"
# Without a scale only the large batch fails to learn. The dynamic scale doubles after `GROWTH` good steps; at an overflow (x) it halves, and the
# step is skipped.
#
# Change `MICRO_BATCHES` to 16: fewer gradients become 0, and training without a scale is nearly that of fp32. Change `GROWTH` to 2: the scale climbs
# faster and overflows more often. Read on: [loss scaling](../docs/loss-scaling.md), [the loss scale, live](../docs/loss-scale.md).

# %% [markdown] lang="zh"
# 没有缩放时，只有大批次学不会。动态缩放在连续 `GROWTH` 步正常后翻倍；溢出（x）时减半，并跳过这一步。
#
# 把 `MICRO_BATCHES` 改为 16：变成 0 的梯度较少，不用缩放也几乎与 fp32 一样。把 `GROWTH` 改为 2：缩放升得更快，溢出更频繁。接着读：[损失缩放](../docs/loss-scaling.zh.md)、[动手调损失缩放](../docs/loss-scale.zh.md)。
