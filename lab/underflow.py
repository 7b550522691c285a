# %% [markdown] lang="en"
# # Gradients of a GPT's activations that fp16 turns into 0
#
# How many gradients of a real GPT are too small for fp16, and which loss scale brings them back?
#
# The gradients of what leaves each layer are counted by power of two. Below 2⁻²⁵ fp16 has 0 only: its smallest number is 2⁻²⁴, and half of that, a
# tie, is rounded to 0.

# %% [markdown] lang="zh"
# # GPT 的激活梯度中，有多少在 fp16 里变成 0
#
# 一个真实 GPT 的梯度中，有多少小到 fp16 无法表示？多大的损失缩放能把它们救回来？
#
# 按 2 的幂次统计每层输出的梯度。小于 2⁻²⁵ 的数在 fp16 中都是 0：最小的数是 2⁻²⁴，它的一半正好居中，也舍入为 0。

# %%
from collections import Counter

import torch
from torch import nn

from course import BLUE, ORANGE, Lab, Transformer, batches, train

lab = Lab("underflow")
SMALL, LARGE, STEPS = (2, 16, 2) if lab.quick else (16, 96, 60)  # sequences, and training before
LENGTH, SCALES = 32 if lab.quick else 128, range(25)

lab.tell(f"Training a GPT for {STEPS} steps in fp32 ...", f"用 fp32 训练一个 GPT，{STEPS} 步……")
model = Transformer(1, 32, LENGTH) if lab.quick else Transformer(3, 128, LENGTH)
for _ in train("fp32", model, STEPS, 2e-3, batches(16, LENGTH, seed=0), warmup=20):
    pass

# %%
LEAST, BEYOND = -25, 16  # below 2^-25 fp16 has 0 only, from 2^16 on infinity only


def gradients(sequences):
    """How many gradients of one batch lie in [2^e, 2^(e+1)), by e; and the largest e of weights'."""
    model.zero_grad()
    counts = Counter()

    def count(gradient):
        exponents = torch.frexp(gradient[gradient != 0]).exponent - 1
        values, numbers = exponents.unique(return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))

    def watch(module, inputs, output):
        output.register_hook(count)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm | nn.Embedding)]
    hooks = [layer.register_forward_hook(watch) for layer in layers]
    model.loss(next(batches(sequences, LENGTH, seed=1))).backward()
    for hook in hooks:
        hook.remove()
    largest = max(int(torch.frexp(p.grad.abs().max()).exponent) - 1 for p in model.parameters())
    return dict(sorted(counts.items())), largest


lab.tell("One backward pass at each batch size ...", "在两种批次大小下各做一次反向传播……")
counts, overflow, zeros = {}, {}, {}
for n in (SMALL, LARGE):
    counts[n], largest = gradients(n)
    overflow[n] = BEYOND - max(largest, *counts[n])  # the first scale 2^s that is too large
    every = sum(counts[n].values())  # a scale of 2^s moves all of them s powers of two to the right
    zeros[n] = [sum(c for e, c in counts[n].items() if e + s < LEAST) / every for s in SCALES]
too_large = min(overflow.values())
enough = next((s for s in SCALES[:too_large] if zeros[LARGE][s] < 1e-3), None)

# %%
few, many = f"{SMALL * LENGTH:,}", f"{LARGE * LENGTH:,}"
lab.table(
    (lab.say("loss scale", "损失缩放"), few, many),
    *((f"2^{s}", f"{zeros[SMALL][s]:.2%}", f"{zeros[LARGE][s]:.2%}") for s in range(0, 21, 4)),
)
lab.finding(
    f"fp16 turns {zeros[SMALL][0]:.1%} of the activations' gradients into 0 at {few} tokens a batch "
    f"and {zeros[LARGE][0]:.1%} at {many}; "
    + (f"a loss scale of 2^{enough}" if enough is not None else "no loss scale")
    + f" brings back all but a thousandth, and 2^{too_large} is too large.",
    f"每批 {few} 个词元时，fp16 把 {zeros[SMALL][0]:.1%} 的激活梯度变成 0；{many} 个词元时为 "
    f"{zeros[LARGE][0]:.1%}；"
    + (f"损失缩放取 2^{enough} 时" if enough is not None else "没有哪种损失缩放能使之")
    + f"只剩不到千分之一，而 2^{too_large} 已经过大。",
    histogram=counts,
    tokens={n: n * LENGTH for n in counts},
    zeros=zeros,
    overflow=overflow,
)


# %%
def draw(figure):
    above, below = figure.subplots(2)
    for (sequences, found), colour in zip(counts.items(), (BLUE, ORANGE), strict=True):
        text = lab.say(f"{sequences} sequences", f"{sequences} 条序列")
        share = [100 * found.get(e, 0) / sum(found.values()) for e in range(-60, 8)]
        above.stairs(share, range(-60, 9), color=colour, lw=2.4, label=text)
        below.plot(SCALES, [100 * x for x in zeros[sequences]], color=colour, lw=2.4, label=text)
    above.axvspan(-45, LEAST, color=ORANGE, alpha=0.13, lw=0)
    above.text(-44, above.get_ylim()[1] * 0.9, lab.say("0 in fp16", "fp16 中为 0"), color=ORANGE)
    above.set(xlim=(-45, 5), xlabel=lab.say("log2 of the gradient", "梯度大小（log2）"))
    above.set_title(lab.say("share of the gradients, %", "占全部梯度的比例，%"))
    below.axvspan(too_large, 24, color="#8a8f98", alpha=0.25, lw=0)
    below.text(23.8, 1, lab.say("overflow", "溢出"), ha="right")
    below.set(xlim=(0, 24), xlabel=lab.say("log2 of the loss scale", "损失缩放（log2）"))
    below.set_title(lab.say("gradients that still become 0, %", "仍然变成 0 的梯度，%"))
    above.legend()


lab.figure(draw, 6.4, 6)

# %% [markdown] lang="en"
# The loss is a mean over tokens, so the larger batch moves the whole histogram to the left, across the line of 2⁻²⁵; each doubling of the scale
# moves it one power of two to the right.
#
# Change `LARGE`: twice the batch needs about twice the scale. Change `STEPS` to 1: before it has learned, the model has larger gradients, and less
# becomes 0. Read on: [the loss scale, live](../docs/loss-scale.md), [the idea](../docs/concepts.md#loss-scaling).

# %% [markdown] lang="zh"
# 损失是对词元的平均，所以批次越大，整个直方图越往左移，越过 2⁻²⁵ 这条线；缩放每翻一倍，直方图就右移一个 2 的幂次。
#
# 改动 `LARGE`：批次翻一倍，缩放大约也要翻一倍。把 `STEPS` 改为 1：模型还没学到什么，梯度较大，变成 0 的较少。接着读：[动手调损失缩放](../docs/loss-scale.zh.md)、[概念](../docs/concepts.zh.md#损失缩放)。
