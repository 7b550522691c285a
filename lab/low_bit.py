# %% [markdown] lang="en"
# # Gradients below 16 bits: how far off they are
#
# How far off is a gradient in 8 and in 4 bits, how much of that averages away, and which block does it come from?
#
# Recipes are simulated: operands are rounded to what a GPU's 8- or 4-bit matmul would read. The gradient of one batch is compared with that of fp32,
# once, and as the mean of several passes with other random bits.

# %% [markdown] lang="zh"
# # 低于 16 位的梯度：误差有多大
#
# 8 位和 4 位的梯度误差有多大？其中多少能被平均掉？误差来自哪个块？
#
# 配方是模拟的：操作数被舍入成 GPU 的 8 位或 4 位矩阵乘法所读到的数。把一个批次的梯度与 fp32 的相比：只取一次，以及用不同随机位多次取均值。

# %%
import torch

from course import BLUE, ORANGE, Lab, Transformer, batches, train
from halfstep import Precision
from halfstep.optim import AdamW

lab = Lab("low_bit")
DRAWS, STEPS, KEPT = (2, 2, 0) if lab.quick else (16, 100, 0)  # KEPT: the block that stays in bf16
LAYERS, WIDTH, LENGTH = (2, 32, 32) if lab.quick else (3, 64, 64)
POLICIES = {
    "bf16": "bf16-mixed",
    "fp8": "fp8,simulate=yes",
    "mxfp8": "mxfp8,simulate=yes",
    "nvfp4": "nvfp4,simulate=yes",
    f"nvfp4, {KEPT} bf16": f"nvfp4,simulate=yes,keep_bf16=layers.{KEPT}*",
}

lab.tell(f"Training a GPT for {STEPS} steps in fp32 ...", f"用 fp32 训练一个 GPT，{STEPS} 步……")
model, data = Transformer(LAYERS, WIDTH, LENGTH), batches(16, LENGTH, seed=0)
for _ in train("fp32", model, STEPS, 3e-3, data, warmup=20):
    pass
batch = next(data)


# %%
def gradients(policy, draws):
    """The gradient of the blocks as one vector, several times with other random bits."""
    found = []
    with Precision(policy, model, AdamW(model.parameters())) as precision:
        for _ in range(draws):
            with precision.autocast():
                loss = model.loss(batch)
            precision.backward(loss)
            found.append(torch.cat([p.grad.flatten().double() for p in model.layers.parameters()]))
            precision.discard()
    return torch.stack(found)


truth = gradients("fp32", 1)[0]


def error(gradient):
    return float((gradient - truth).norm() / truth.norm())


one, mean = {}, {}
for name, policy in POLICIES.items():
    lab.tell(f"{DRAWS} backward passes with {name} ...", f"用 {name} 做 {DRAWS} 次反向传播……")
    found = gradients(policy, DRAWS)
    one[name], mean[name] = error(found[0]), error(found.mean(0))
lab.tell("One block after the other in nvfp4 ...", "逐个让一个块使用 nvfp4……")
rule = "bf16-mixed,simulate=yes,rules=layers.{}*:nvfp4"
blocks = [error(gradients(rule.format(block), 1)[0]) for block in range(LAYERS)]

# %%
kept = [*POLICIES][-1]
head = lab.say("recipe,one pass,mean of passes", "配方,一次,多次的均值").split(",")
lab.table(head, *((name, f"{one[name]:.2%}", f"{mean[name]:.2%}") for name in POLICIES))
worst = max(range(LAYERS), key=blocks.__getitem__)
lab.finding(
    f"A gradient in mxfp8 is off by {one['mxfp8']:.1%} and in nvfp4 by {one['nvfp4']:.1%} "
    f"({mean['nvfp4']:.1%} as the mean of {DRAWS} passes); with block {KEPT} in bf16 {one[kept]:.1%} are "
    f"left, and block {worst} makes the largest error by itself ({blocks[worst]:.1%}).",
    f"mxfp8 的梯度误差为 {one['mxfp8']:.1%}，nvfp4 为 {one['nvfp4']:.1%}（{DRAWS} 次平均后为 "
    f"{mean['nvfp4']:.1%}）；把块 {KEPT} 保留为 bf16 后剩 {one[kept]:.1%}，"
    f"单独造成误差最大的是块 {worst}（{blocks[worst]:.1%}）。",
    one=one,
    mean=mean,
    blocks=blocks,
)


# %%
def draw(figure):
    recipes, each = figure.subplots(2, height_ratios=(2, 1))
    for shift, found, colour in ((-0.2, one, ORANGE), (0.2, mean, BLUE)):
        label = lab.say("one backward pass", "一次反向传播")
        label = label if found is one else lab.say(f"mean of {DRAWS} passes", f"{DRAWS} 次的均值")
        rows = [row + shift for row in range(len(found))]
        bars = recipes.barh(
            rows, [100 * e for e in found.values()], 0.38, color=colour, label=label
        )
        recipes.bar_label(bars, fmt="%.1f", padding=3, fontsize=10)
    recipes.set_yticks(range(len(one)), [name.replace(", ", ",\n") for name in one])
    recipes.legend(loc="upper right")
    bars = each.barh([f"{n}" for n in range(LAYERS)], [100 * e for e in blocks], 0.6, color=ORANGE)
    each.bar_label(bars, fmt="%.1f", padding=3, fontsize=10)
    for axes in (recipes, each):
        axes.invert_yaxis()
        axes.margins(x=0.12)
    recipes.set_title(lab.say("error of the gradient, % of its norm", "梯度误差，占其范数的 %"))
    each.set_title(lab.say("with one block alone in nvfp4", "只有一个块使用 nvfp4"))


lab.figure(draw, 6.4, 6)

# %% [markdown] lang="en"
# A blue bar is shorter than its orange one where rounding is random (stochastic), as in nvfp4: over steps that part of the error averages away.
# Below, the error that each block makes by itself.
#
# Change `DRAWS` to 1: both bars are the same. Change `KEPT` to 2, the last block: keeping that one helps little. Read on: [formats below 16 bits](../docs/low-bit.md),
# [glossary](../docs/glossary.md).

# %% [markdown] lang="zh"
# 蓝条比橙条短的地方使用了随机舍入（如 nvfp4）：这部分误差会随训练步平均掉。下图是每个块单独造成的误差。
#
# 把 `DRAWS` 改为 1：两条相同。把 `KEPT` 改为 2（最后一个块）：保留它帮助不大。接着读：[16 位以下的格式](../docs/low-bit.zh.md)、[术语表](../docs/glossary.zh.md)。
