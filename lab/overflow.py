# %% [markdown] lang="en"
# # The same GPT with larger and larger activations
#
# What happens when activations, not gradients, become too large for fp16, and does a loss scale help?
#
# What goes into the residual stream is multiplied by 2^k, and each LayerNorm, which divides by the size of what it reads, takes the factor out
# again: all these models compute the same function.

# %% [markdown] lang="zh"
# # 同一个 GPT，激活值越来越大
#
# 当超出 fp16 上限的是激活值而不是梯度时会怎样？损失缩放有用吗？
#
# 进入残差流的一切都乘以 2^k，而每个 LayerNorm 会除以它所读到的大小，把这个倍数消去：所有这些模型计算的是同一个函数。

# %%
import copy
import math

import torch
from torch import nn

from course import BLACK, BLUE, ORANGE, Lab, Transformer, batches, train
from halfstep import Precision, first_cause
from halfstep.formats import FP16

lab = Lab("overflow")
POWERS, STEPS = (20, 2) if lab.quick else (20, 60)  # how often activations double; training before
LENGTH = 16 if lab.quick else 64
POLICIES = {"fp32": "fp32", "bf16": "bf16-mixed"}
POLICIES |= {f"fp16 {s}": f"compute=fp16,scale=static,init_scale={s}" for s in (1, 65536)}

lab.tell(f"Training a GPT for {STEPS} steps in fp32 ...", f"用 fp32 训练一个 GPT，{STEPS} 步……")
model = Transformer(1, 32, LENGTH) if lab.quick else Transformer(2, 128, LENGTH)
for _ in train("fp32", model, STEPS, 2e-3, batches(16, LENGTH, seed=0), warmup=20):
    pass
batch = next(batches(8, LENGTH, seed=0, held_out=True))


# %%
def enlarged(factor):
    """The same function, with a residual stream that is larger by a factor."""
    larger = copy.deepcopy(model)
    writers = [larger.tokens, larger.places]
    writers += [layer for block in larger.layers for layer in (block.proj, block.down)]
    with torch.no_grad():
        for parameter in (p for writer in writers for p in writer.parameters()):
            parameter.mul_(factor)
    return larger


@torch.no_grad()
def largest_output(larger):
    """The largest magnitude that leaves a linear layer, in fp32."""
    seen = []
    layers = [m for m in larger.modules() if isinstance(m, nn.Linear)]
    hooks = [
        m.register_forward_hook(lambda m, x, y: seen.append(float(y.abs().max()))) for m in layers
    ]
    larger(batch[0])
    for hook in hooks:
        hook.remove()
    return max(seen)


def loss_of(policy, larger):
    """The loss under a policy; None where it is not finite."""
    with Precision(policy, larger, torch.optim.SGD(larger.parameters(), lr=0.0)) as precision:
        with precision.autocast():
            loss = larger.loss(batch).item()
        return loss if math.isfinite(loss) else None


lab.tell(f"Doubling activations {POWERS} times ...", f"把激活值加倍 {POWERS} 次……")
sizes, losses, failed = [], {name: [] for name in POLICIES}, None
for exponent in range(POWERS + 1):
    larger = enlarged(2.0**exponent)
    sizes.append(largest_output(larger))
    for name, policy in POLICIES.items():
        losses[name].append(loss_of(policy, larger))
        if losses[name][-1] is None and failed is None:
            failed = larger
cause = None
if failed:
    lab.tell("Asking halfstep for the first cause ...", "让 halfstep 找出最初的原因……")
    optimizer = torch.optim.SGD(failed.parameters(), lr=0.0)
    with Precision(POLICIES["fp16 1"], failed, optimizer) as precision:
        cause = first_cause(precision, lambda: failed.loss(batch))

# %%
rows = range(0, POWERS + 1, 4)
shown = {n: [math.nan if x is None else x for x in found] for n, found in losses.items()}
head = lab.say("largest output", "最大输出")
lab.table(
    (head, *POLICIES), *((f"{sizes[r]:,.0f}", *(f"{shown[n][r]:.4f}" for n in shown)) for r in rows)
)
off = max(abs(a - b) for a, b in zip(losses["bf16"], losses["fp32"], strict=True))
first = [next((s for s, x in zip(sizes, losses[n], strict=True) if x is None), None)
         for n in ("fp16 1", "fp16 65536")]  # fmt: skip
ends = [f"{x:,.0f}" if x else "inf" for x in first]
where = f"{cause.op}, {cause.module}" if cause else "-"
lab.finding(
    f"fp16 gave NaN from a largest output of {ends[0]} on without a loss scale and of {ends[1]} with "
    f"one of 65536, since a scale multiplies the loss and not the activations (halfstep names the "
    f"first cause: {where}); bf16 stayed within {off:.1g} of the loss of fp32 up to {sizes[-1]:,.0f}.",
    f"fp16 在各层最大输出达到 {ends[0]}（无损失缩放）和 {ends[1]}（缩放 65536）起得到 NaN，"
    f"因为缩放乘的是损失，不是激活值（halfstep 指出最初的原因：{where}）；"
    f"bf16 直到 {sizes[-1]:,.0f} 都与 fp32 的损失相差不超过 {off:.1g}。",
    sizes=sizes,
    losses=losses,
    cause=where,
)


# %%
def draw(figure):
    axes, logs = figure.subplots(), [math.log2(size) for size in sizes]
    top, limit = 1.5 * max(losses["fp32"]), math.log2(FP16.max)
    axes.axvspan(limit, logs[-1] + 0.5, color=ORANGE, alpha=0.13, lw=0)
    axes.plot(logs, losses["fp32"], color=BLACK, lw=2, label="fp32")
    axes.plot(logs, losses["bf16"], "o", color=BLUE, label="bf16")
    axes.plot(logs, shown["fp16 1"], "s", color=ORANGE, ms=11, mfc="none", mew=2, label="fp16")
    gone = [x for x, loss in zip(logs, losses["fp16 1"], strict=True) if loss is None]
    text = lab.say("fp16: NaN, at any loss scale", "fp16：NaN，与损失缩放无关")
    axes.plot(gone, [top] * len(gone), "X", color=ORANGE, ms=10, label=text)
    axes.set(ylim=(0, 1.15 * top), title=lab.say("loss", "损失"))
    axes.set_xlabel(lab.say("log2 of the largest output of a layer", "各层输出的最大值（log2）"))
    axes.legend(loc="lower left")


lab.figure(draw, 6.4, 4.6)

# %% [markdown] lang="en"
# LayerNorm takes out the factor by which the residual stream was enlarged; what is wrong beyond 65504 is the format.
#
# Change `POWERS` to 10: nothing reaches 65504, and all three formats agree. Read on: [the idea](../docs/concepts.md#operations-that-stay-in-fp32),
# [diagnostics](../docs/diagnostics.md).

# %% [markdown] lang="zh"
# 残差流被放大的倍数由 LayerNorm 消去；超过 65504 之后出错的只是格式。
#
# 把 `POWERS` 改为 10：没有数达到 65504，三种格式结果一致。接着读：[概念](../docs/concepts.zh.md#保持-fp32-的运算)、[诊断](../docs/diagnostics.zh.md)。
