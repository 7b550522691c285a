# %% [markdown] lang="en"
# # What each format makes of 1 + small updates
#
# What happens to a weight of 1 when each update is smaller than half the gap between numbers?
#
# First as any 16-bit weight is updated: the sum is rounded to the nearest number of the format. Then with optimizers that keep more than the bf16
# weight: 16 more bits of it (`split`), the part that rounding took away (`kahan`), or nothing, but rounding up or down at random (`stochastic`).

# %% [markdown] lang="zh"
# # 从 1 开始累加微小更新：各格式得到什么
#
# 当每次更新都小于相邻两数间隔的一半时，值为 1 的权重会怎样？
#
# 先按普通的 16 位权重更新：和被舍入到该格式中最近的数。再用保留更多信息的优化器：多存 16 位（`split`），存下被舍去的部分（`kahan`），或者什么都不存，但随机地向上或向下舍入（`stochastic`）。

# %%
import torch
from torch import nn

from course import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, Lab
from halfstep.optim import SGD

lab = Lab("small_updates")
UPDATE, STEPS, SEEDS = (1e-3, 100, 4) if lab.quick else (1e-3, 100, 64)
PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# %%
def summed(dtype):
    """The weight after each update, rounded to nearest."""
    weight, update = torch.ones((), dtype=dtype), torch.tensor(UPDATE, dtype=dtype)
    found = [1.0]
    for _ in range(STEPS):
        weight = weight + update
        found.append(weight.item())
    return found


def trained(how, seed=0):
    """The weight after each step of an optimizer that keeps more."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = SGD([weight], lr=UPDATE, update=how, seed=seed)
    found = [1.0]
    for _ in range(STEPS):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
        found.append(float(optimizer.read_master(weight)))
    return found


lab.tell(f"Adding {UPDATE:g} {STEPS} times ...", f"把 {UPDATE:g} 加 {STEPS} 次……")
curves = {name: summed(dtype) for name, dtype in PLAIN.items()}
curves |= {f"bf16-{how}": trained(how) for how in ("split", "kahan")}
lab.tell(f"... with stochastic rounding, {SEEDS} seeds ...", f"……随机舍入，{SEEDS} 个种子……")
runs = torch.tensor([trained("stochastic", seed) for seed in range(SEEDS)], dtype=torch.float64)
curves["bf16-sr"] = runs.mean(0).tolist()

# %%
truth = 1 + STEPS * UPDATE
way = {name: (curve[-1] - 1) / (truth - 1) for name, curve in curves.items()}
names = [name for name in curves if name != "fp32"]
head = lab.say("format,weight,of the way", "格式,权重,走完的路程").split(",")
lab.table(head, *((name, f"{curves[name][-1]:.6f}", f"{way[name]:.1%}") for name in curves))
lab.finding(
    f"Of the way from 1 to {truth:g} in steps of {UPDATE:g}, "
    + ", ".join(f"{name} covered {way[name]:.1%}" for name in names)
    + " (bf16-sr on average).",
    f"从 1 到 {truth:g} 的路程（每步 {UPDATE:g}）中，"
    + "，".join(f"{name} 走了 {way[name]:.1%}" for name in names)
    + "（bf16-sr 为平均）。",
    curves=curves,
)


# %%
def draw(figure):
    axes = figure.subplots()
    for number in range(16):
        axes.axhline(1 + number / 128, color="#9a9c9f", lw=0.8, zorder=1)
    spread = runs.std(0, correction=0)
    low, high = runs.mean(0) - spread, runs.mean(0) + spread
    axes.fill_between(range(STEPS + 1), low, high, color=GREEN, alpha=0.2, lw=0)
    styles = {"fp32": (BLACK, "-"), "fp16": (ORANGE, "-"), "bf16": (BLUE, "-")}
    styles |= {"bf16-split": (SKY, "--"), "bf16-kahan": (PINK, ":"), "bf16-sr": (GREEN, "-")}
    for name, (colour, style) in styles.items():
        axes.plot(
            curves[name], style, color=colour, lw=2.4, label=f"{name}: {curves[name][-1]:.4f}"
        )
    axes.set(xlim=(0, STEPS), ylim=(0.995, max(truth, float(high.max())) + 0.005))
    axes.set_xlabel(lab.say(f"updates of {UPDATE:g}", f"更新次数（每次 {UPDATE:g}）"))
    axes.set_title(lab.say("weight (grey lines: the numbers of bf16)", "权重（灰线：bf16 的数）"))
    axes.legend(loc="upper left")


lab.figure(draw, 6.4, 5)

# %% [markdown] lang="en"
# bf16 has numbers at the grey lines only, and every update is too small to reach the next one; the band is one standard deviation of stochastic
# rounding.
#
# Change `UPDATE` to 0.004, more than half a gap: bf16 moves a whole gap at a time, and goes twice as far as it should. Change `SEEDS` to 1:
# stochastic rounding is a single random walk. Read on: [the number line](../docs/number-line.md), [the
# idea](../docs/concepts.md#what-goes-wrong-in-16-bits).

# %% [markdown] lang="zh"
# bf16 只在灰线处有数，每一次更新都太小，到不了下一条线；色带是随机舍入的一个标准差。
#
# 把 `UPDATE` 改为 0.004（超过半个间隔）：bf16 每次走一整个间隔，最后走了应走路程的两倍。把 `SEEDS` 改为 1：随机舍入只是一次随机游走。接着读：[数轴](../docs/number-line.zh.md)、[概念](../docs/concepts.zh.md#16-位会出什么问题)。
