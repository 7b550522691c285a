# %% [markdown] lang="en"
# # When do 16 bits pay?
#
# From which width and batch on is training in 16 bits faster than in fp32 on this machine?
#
# Steps of the two policies are timed in turn, one after the other, so that what else the machine does hits both alike; the figure shows the median
# of the pairs' ratios.

# %% [markdown] lang="zh"
# # 16 位什么时候划算？
#
# 在这台机器上，模型多宽、批次多大时，16 位训练才比 fp32 快？
#
# 两种策略的训练步轮流计时，紧挨着进行，使机器上的其他负载对两者影响相同；图中是各对比值的中位数。

# %%
import sys
import time
from pathlib import Path
from statistics import median

import torch

from course import BLACK, BLUE, ORANGE, Lab, Transformer, batches
from halfstep import Precision
from halfstep.optim import AdamW

lab = Lab("speed")
POLICY, WIDTH, ROUNDS = ("bf16-mixed", 64, 1) if lab.quick else ("bf16-mixed", 256, 7)
WIDTHS, SEQUENCES = ((32, 64), (1, 2)) if lab.quick else ((64, 128, 256, 512), (1, 2, 4, 8, 16))
info = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
PROCESSOR = info.partition("model name")[2].partition("\n")[0].strip("\t: ") or sys.platform
PROCESSOR += " with bf16" if "avx512_bf16" in info or "amx_bf16" in info else " without bf16"
PROCESSOR += f", threads: {torch.get_num_threads()}"


# %%
def ratio(width, sequences):
    """How many times as fast as fp32 the policy's steps are."""
    batch, runs, ratios = next(batches(sequences, 64, seed=0)), [], []
    for policy in ("fp32", POLICY):
        model = Transformer(2, width, 64)
        runs.append((model, Precision(policy, model, AdamW(model.parameters()))))
    for number in range(2 + ROUNDS):
        spent = []
        for model, precision in runs:
            begin = time.perf_counter()
            with precision.autocast():
                loss = model.loss(batch)
            precision.step(loss)
            spent.append(time.perf_counter() - begin)
        if number >= 2:  # the first two warm up
            ratios.append(spent[0] / spent[1])
    for _, precision in runs:
        precision.close()
    return median(ratios)


by_width, by_batch = {}, {}
for width in WIDTHS:
    lab.tell(f"Width {width}, 8 sequences ...", f"宽度 {width}，8 条序列……")
    by_width[width] = ratio(width, 8)
for sequences in SEQUENCES:
    lab.tell(f"Width {WIDTH}, {sequences} sequences ...", f"宽度 {WIDTH}，{sequences} 条序列……")
    by_batch[sequences] = ratio(WIDTH, sequences)

# %%
lab.table((lab.say("width", "宽度"), *by_width), ("", *(f"{r:.2f}" for r in by_width.values())))
lab.table(
    (lab.say("sequences", "序列数"), *by_batch), ("", *(f"{r:.2f}" for r in by_batch.values()))
)
worth = [w for w in WIDTHS if all(r >= 1.05 for x, r in by_width.items() if x >= w)]
ends = by_width[WIDTHS[0]], by_width[WIDTHS[-1]], by_batch[SEQUENCES[0]], by_batch[SEQUENCES[-1]]
pays = f"it pays from width {worth[0]} on" if worth else "it does not pay at the largest width"
pays_zh = f"从宽度 {worth[0]} 开始划算" if worth else "在最大的宽度上也不划算"
lab.finding(
    f"Here {POLICY} is {ends[0]:.2f} times as fast as fp32 at width {WIDTHS[0]} and {ends[1]:.2f} "
    f"times at width {WIDTHS[-1]}: {pays}. At width {WIDTH} it is {ends[2]:.2f} times as fast with "
    f"{SEQUENCES[0]} sequence and {ends[3]:.2f} times with {SEQUENCES[-1]} ({PROCESSOR}).",
    f"在这里，{POLICY} 的速度在宽度 {WIDTHS[0]} 时是 fp32 的 {ends[0]:.2f} 倍，宽度 {WIDTHS[-1]} 时是 "
    f"{ends[1]:.2f} 倍：{pays_zh}。宽度 {WIDTH} 时，{SEQUENCES[0]} 条序列的批次为 {ends[2]:.2f} 倍，"
    f"{SEQUENCES[-1]} 条为 {ends[3]:.2f} 倍（{PROCESSOR}）。",
    by_width={str(width): found for width, found in by_width.items()},
    by_batch={str(sequences): found for sequences, found in by_batch.items()},
)


# %%
def draw(figure):
    panels = figure.subplots(2, sharey=True)
    for axes, found in zip(panels, (by_width, by_batch), strict=True):
        axes.axhspan(0, 1, color=ORANGE, alpha=0.1, lw=0)
        axes.axhline(1, color=BLACK, lw=1.2)
        axes.plot([*found], [*found.values()], "-o", color=BLUE, lw=2.2)
        for x, y in found.items():
            axes.annotate(f"{y:.2f}", (x, y), (0, 7), textcoords="offset points", ha="center")
        axes.set_xscale("log", base=2)
        axes.set_xticks([*found], [str(x) for x in found])
        axes.set_ylim(0, 1.25 * max(*by_width.values(), *by_batch.values(), 1.2))
    title = f"speed of {POLICY} over fp32, by width", f"{POLICY} 相对 fp32 的速度，随宽度变化"
    panels[0].set_title(lab.say(*title))
    panels[1].set_title(
        lab.say(f"by sequences in a batch (width {WIDTH})", f"随批次变化（宽度 {WIDTH}）")
    )


lab.figure(draw, 6.4, 5.6)

# %% [markdown] lang="en"
# Where the line is in the red area, 16 bits are slower than fp32: casts cost more than the products save.
#
# Change `POLICY` to "fp16-mixed": most CPUs are slower than in fp32 at every width, because they have no instructions for fp16. On a busy machine
# more `ROUNDS` are needed. Read on: [measure your own model](../docs/bench.md), [the idea](../docs/concepts.md#speed-and-when-it-does-not-pay).

# %% [markdown] lang="zh"
# 曲线落在红色区域时，16 位比 fp32 还慢：类型转换的开销超过了矩阵乘法省下的时间。
#
# 把 `POLICY` 改为 "fp16-mixed"：多数 CPU 没有 fp16 指令，在任何宽度上都比 fp32 慢。机器繁忙时需要更多的 `ROUNDS`。接着读：[测量自己的模型](../docs/bench.zh.md)、[概念](../docs/concepts.zh.md#速度以及什么时候不划算)。
