# %% [markdown] lang="en"
# # Why 16 bits do not halve the memory
#
# What holds the memory of a training step, and why does mixed precision not halve it?
#
# halfstep's meter counts what a step holds: state from the optimizer, and what autograd saves between forward and backward.

# %% [markdown] lang="zh"
# # 为什么 16 位没有让内存减半
#
# 训练一步的内存都被什么占用？混合精度为什么没有让它减半？
#
# halfstep 的计量器统计一步所占用的内存：优化器的状态，以及自动求导在前向与反向之间保存的张量。

# %%
import torch
import torch.nn.functional as F

from course import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, Lab, Transformer
from halfstep import MemoryMeter, Precision
from halfstep.optim import AdamW

lab = Lab("memory")
SEQUENCES, WIDTH, VOCABULARY = (4, 64, 500) if lab.quick else (16, 192, 4000)
LENGTH, LAYERS = 64, 4
POLICIES = ("fp32", "bf16-mixed", "bf16-split", "bf16-split,moments=8bit")
PARTS = {
    "weights": (BLUE, "权重"),
    "masters": (SKY, "余数"),
    "gradients": (ORANGE, "梯度"),
    "moments": ("#b57c00", "动量"),
    "cast copies": ("#f0e442", "转换副本"),
    "activations": (GREEN, "激活值"),
    "logits": (PINK, "logits"),
}

# %%
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
held = {}
for policy in POLICIES:
    lab.tell(f"One step with {policy} ...", f"用 {policy} 训练一步……")
    model = Transformer(LAYERS, WIDTH, LENGTH, vocabulary=VOCABULARY)
    with (
        Precision(policy, model, AdamW(model.parameters())) as precision,
        MemoryMeter(precision, (inputs, targets), logits=VOCABULARY) as meter,
    ):
        with precision.autocast():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        precision.step(loss)
    held[policy] = {part: dict(meter.memory.bytes.get(part, {})) for part in PARTS}

# %%
size = {p: {part: sum(by.values()) for part, by in parts.items()} for p, parts in held.items()}
total = {policy: sum(parts.values()) for policy, parts in size.items()}
mixed = held["bf16-mixed"]
fp32 = sum(by.get("fp32", 0) for by in mixed.values()) / total["bf16-mixed"]
state = sum(size["bf16-mixed"][part] for part in ("weights", "gradients", "moments"))
state, copies = (n / total["bf16-mixed"] for n in (state, size["bf16-mixed"]["cast copies"]))
ratio = {policy: total[policy] / total["fp32"] for policy in POLICIES}
short = [policy.replace("moments=", "") for policy in POLICIES]
names = {part: lab.say(part, chinese) for part, (_, chinese) in PARTS.items()}
lab.table(
    (lab.say("MB", "MB"), *short),
    *((names[part], *(f"{size[p][part] / 1e6:.2f}" for p in POLICIES)) for part in PARTS),
    (lab.say("all", "合计"), *(f"{total[p] / 1e6:.2f} ({ratio[p]:.0%})" for p in POLICIES)),
)
lab.finding(
    f"bf16-mixed holds {ratio['bf16-mixed']:.0%} of what fp32 holds: {fp32:.0%} of it is still fp32 "
    f"({state:.0%} weights, gradients and moments), and {copies:.0%} are 16-bit copies of weights that "
    f"come on top; {POLICIES[-1]} holds {ratio[POLICIES[-1]]:.0%}.",
    f"bf16-mixed 的占用是 fp32 的 {ratio['bf16-mixed']:.0%}：其中 {fp32:.0%} 仍为 fp32"
    f"（{state:.0%} 是权重、梯度和动量），另有 {copies:.0%} 是额外的 16 位权重副本；"
    f"{POLICIES[-1]} 的占用是 fp32 的 {ratio[POLICIES[-1]]:.0%}。",
    bytes=held,
)


# %%
def draw(figure):
    axes, bottom = figure.subplots(), dict.fromkeys(POLICIES, 0.0)
    for part, (colour, chinese) in PARTS.items():
        for at, policy in enumerate(POLICIES):
            for dtype, count in sorted(held[policy][part].items()):
                how = {"hatch": "///"} if dtype == "fp32" and policy != "fp32" else {}
                height = count / 1e6
                axes.bar(at, height, 0.8, bottom[policy], color=colour, edgecolor="white", **how)
                bottom[policy] += height
        axes.bar(0, 0, color=colour, label=lab.say(part, chinese))
    for at, policy in enumerate(POLICIES):
        axes.text(at, bottom[policy], f"{ratio[policy]:.0%}", ha="center", va="bottom")
    axes.axhline(total["fp32"] / 2e6, color=BLACK, ls="--", lw=1.2)
    axes.set_xticks(range(len(POLICIES)), [policy.replace(",", ",\n") for policy in POLICIES])
    axes.set_xlim(-0.6, 5.4)
    axes.legend(loc="upper right")
    axes.set_title(lab.say("MB of one step (hatched: still fp32; dashed: half)",
                           "一步占用的 MB（斜线：仍为 fp32；虚线：一半）"))  # fmt: skip


lab.figure(draw, 6.8, 5.6)

# %% [markdown] lang="en"
# In the second column only the activations have shrunk; the hatched parts are still fp32, and the 16-bit copies of weights come on top.
#
# Change `SEQUENCES` to 1: there are few activations to save on, and bf16-mixed holds more than fp32. Change `VOCABULARY` to 16000: the logits are
# the largest part of bf16-mixed. Read on: [memory](../docs/memory.md), [the idea](../docs/concepts.md#memory-does-not-halve).

# %% [markdown] lang="zh"
# 第二列中只有激活值变小了；带斜线的部分仍是 fp32，而权重的 16 位转换副本是额外增加的。
#
# 把 `SEQUENCES` 改为 1：几乎没有激活值可省，bf16-mixed 反而比 fp32 占用更多。把 `VOCABULARY` 改为 16000：logits 成为 bf16-mixed 中最大的一部分。接着读：[内存](../docs/memory.zh.md)、[概念](../docs/concepts.zh.md#内存不会减半)。
