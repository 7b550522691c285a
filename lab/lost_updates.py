# %% [markdown] lang="en"
# # Updates that rounding swallows, in a GPT
#
# What does a GPT lose at a small learning rate when its weights are bf16, and what prevents it?
#
# `bf16-pure` has nothing but bf16 weights; `bf16-split` and `bf16-kahan` keep 16 more bits of each; `bf16-sr` keeps nothing, and rounds up or down
# at random. The meter takes a sample of the weights, and compares their bits before and after a step that should have changed them.

# %% [markdown] lang="zh"
# # GPT 训练中被舍入吞掉的更新
#
# 学习率很小时，bf16 权重会让 GPT 丢失什么？怎样避免？
#
# `bf16-pure` 只有 bf16 权重；`bf16-split` 和 `bf16-kahan` 为每个权重多存 16 位；`bf16-sr` 什么都不多存，而是随机地向上或向下舍入。计量器对权重取样，比较本应改变它们的一步前后的各个位。

# %%
from statistics import fmean

import torch

from course import BLACK, BLUE, GREEN, PINK, SKY, Lab, Transformer, batches, train
from halfstep import LostUpdateMeter

lab = Lab("lost_updates")
LEARNING_RATE, STEPS, EVERY = (2e-5, 4, 2) if lab.quick else (2e-5, 60, 10)
LENGTH = 16 if lab.quick else 64
POLICIES = {
    "fp32": BLACK,
    "bf16-pure": BLUE,
    "bf16-split": SKY,
    "bf16-kahan": PINK,
    "bf16-sr": GREEN,
}

# %%
held_out = next(batches(8, LENGTH, seed=0, held_out=True))


def run(policy):
    """At every few steps the share of updates that are lost, and the loss on held-out text."""
    model = Transformer(1, 32, LENGTH) if lab.quick else Transformer(2, 128, LENGTH)
    meter, found = None, {"steps": [], "lost": [], "loss": []}
    data = batches(8, LENGTH, seed=0)
    steps = train(policy, model, STEPS, LEARNING_RATE, data)
    for step, (_, precision) in enumerate(steps, 1):
        meter = meter or LostUpdateMeter(precision, EVERY)
        if meter.fresh:
            found["steps"].append(step)
            found["lost"].append(fmean(report.lost for report in meter.report()))
            with torch.no_grad(), precision.autocast():
                found["loss"].append(float(model.loss(held_out)))
    return found


runs = {}
for policy in POLICIES:
    lab.tell(f"Training {STEPS} steps with {policy} ...", f"用 {policy} 训练 {STEPS} 步……")
    runs[policy] = run(policy)

# %%
lost = {policy: fmean(found["lost"]) for policy, found in runs.items()}
last = {policy: found["loss"][-1] for policy, found in runs.items()}
far = {policy: loss - last["fp32"] for policy, loss in last.items()}
head = lab.say("policy,updates lost,final loss", "策略,丢失的更新,最终损失").split(",")
lab.table(head, *((policy, f"{lost[policy]:.1%}", f"{last[policy]:.4f}") for policy in POLICIES))
lab.finding(
    f"At a learning rate of {LEARNING_RATE:g}, bf16-pure loses {lost['bf16-pure']:.1%} of its updates "
    f"and ends {far['bf16-pure']:+.4f} from the loss {last['fp32']:.4f} of fp32; bf16-split ends "
    f"{far['bf16-split']:+.4f} from it, bf16-kahan {far['bf16-kahan']:+.4f} and bf16-sr "
    f"{far['bf16-sr']:+.4f}.",
    f"学习率为 {LEARNING_RATE:g} 时，bf16-pure 丢失 {lost['bf16-pure']:.1%} 的更新，最终损失与 fp32 的 "
    f"{last['fp32']:.4f} 相差 {far['bf16-pure']:+.4f}；bf16-split 相差 {far['bf16-split']:+.4f}，"
    f"bf16-kahan 相差 {far['bf16-kahan']:+.4f}，bf16-sr 相差 {far['bf16-sr']:+.4f}。",
    lost=lost,
    loss=last,
)


# %%
def draw(figure):
    lost, loss = figure.subplots(2, sharex=True)
    for policy, colour in POLICIES.items():
        found, style = runs[policy], {"fp32": "--", "bf16-split": ":"}.get(policy, "-")
        lost.plot(found["steps"], [100 * x for x in found["lost"]], style, color=colour, lw=2.4)
        loss.plot(found["steps"], found["loss"], style, color=colour, lw=2.4, label=policy)
    lost.set_title(lab.say("updates that are lost, %", "丢失的更新，%"))
    loss.set_title(lab.say("validation loss", "验证损失"))
    loss.set_xlabel(lab.say("step", "步"))
    loss.legend()


lab.figure(draw, 6.4, 6)

# %% [markdown] lang="en"
# bf16-pure loses most of its updates and learns more slowly; bf16-split, bf16-kahan and bf16-sr lie on fp32.
#
# Change `LEARNING_RATE` to 1e-3: far fewer updates are lost, and bf16-pure ends close to fp32. Read on: [the
# idea](../docs/concepts.md#master-weights), [policies](../docs/policies.md).

# %% [markdown] lang="zh"
# bf16-pure 丢失大部分更新，学得更慢；bf16-split、bf16-kahan 和 bf16-sr 与 fp32 重合。
#
# 把 `LEARNING_RATE` 改为 1e-3：丢失的更新少得多，bf16-pure 的结果接近 fp32。接着读：[概念](../docs/concepts.zh.md#主权重)、[精度策略](../docs/policies.zh.md)。
