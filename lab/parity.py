# %% [markdown] lang="en"
# # What a format changes, and what a seed changes
#
# Does a GPT on text or a BERT on labelled posts end elsewhere in 16 bits than in fp32, or does another seed change more?
#
# The GPT reads Python's manual. The BERT (an encoder: no causal mask, read at its first position) learns which emotion a post has; a byte is a
# token, and posts are put together from a few words.

# %% [markdown] lang="zh"
# # 数值格式的影响与随机种子的影响
#
# 用 16 位训练 GPT（文本）和 BERT（带标签的短文），结果与 fp32 不同吗？还是换一个随机种子的影响更大？
#
# GPT 读 Python 的手册。BERT（编码器：没有因果掩码，在第一个位置读出结果）学习短文的情绪；每个字节是一个词元，短文由少量词语拼成。

# %%
from statistics import fmean, stdev

import torch

from course import BLACK, BLUE, ORANGE, Lab, Transformer, batches, train

lab = Lab("parity")
STEPS, SEEDS, EVERY = (4, 2, 2) if lab.quick else (100, 3, 20)
LENGTH, WIDTH = (16, 32) if lab.quick else (48, 64)
POLICIES = {"fp32": BLACK, "bf16-mixed": BLUE, "fp16-mixed": ORANGE}

# %%
FEELINGS = (
    ("thrilled", "delighted", "so happy"),
    ("miserable", "heartbroken", "so sad"),
    ("furious", "annoyed", "so angry"),
    ("terrified", "nervous", "so scared"),
)
TOPICS = ("my exam", "this film", "the news", "our trip", "the rain", "her letter", "work", "today")


def posts(count, seed):
    """Batches of posts as bytes, padded by blanks, and the numbers of their emotions."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        texts, labels = [], torch.randint(4, (count,), generator=generator)
        for label in labels.tolist():
            feeling, topic = torch.randint(24, (2,), generator=generator).tolist()
            text = f"I am {FEELINGS[label][feeling % 3]} about {TOPICS[topic % 8]}"
            texts.append([*text.encode().ljust(LENGTH)[:LENGTH]])
        yield torch.tensor(texts), labels


def run(kind, policy, seed):
    """Losses on what was held out, every few steps; at the same seed same weights and batches."""
    if kind == "GPT":
        model, data = Transformer(2, WIDTH, LENGTH, seed=seed), batches(8, LENGTH, seed)
        held_out = next(batches(32, LENGTH, seed=0, held_out=True))
    else:
        model, data = Transformer(2, WIDTH, LENGTH, classes=4, seed=seed), posts(16, seed)
        held_out = next(posts(200, seed=999))
    losses, rate = [], 3e-3 if kind == "GPT" else 1e-3
    for step, (_, precision) in enumerate(train(policy, model, STEPS, rate, data, warmup=10), 1):
        if step % EVERY == 0:
            with torch.no_grad(), precision.autocast():
                losses.append(float(model.loss(held_out)))
    return losses


runs = {}
for kind in ("GPT", "BERT"):
    for policy in POLICIES:
        lab.tell(f"{kind}, {policy}, {SEEDS} seeds ...", f"{kind}，{policy}，{SEEDS} 个种子……")
        runs[kind, policy] = [run(kind, policy, seed) for seed in range(SEEDS)]

# %%
ends = {key: [losses[-1] for losses in found] for key, found in runs.items()}
moved = {
    (kind, policy): fmean(abs(a - b) for a, b in zip(found, ends[kind, "fp32"], strict=True))
    for (kind, policy), found in ends.items()
}
noise = {kind: stdev(ends[kind, "fp32"]) for kind in ("GPT", "BERT")}
apart = [k for k in noise if max(moved[k, "bf16-mixed"], moved[k, "fp16-mixed"]) >= noise[k]]
lab.table(
    lab.say("model,bf16-mixed moves,fp16-mixed moves,a seed moves",
            "模型,bf16-mixed 的影响,fp16-mixed 的影响,种子的影响").split(","),
    *((k, f"{moved[k, 'bf16-mixed']:.4f}", f"{moved[k, 'fp16-mixed']:.4f}", f"{noise[k]:.4f}")
      for k in noise),
)  # fmt: skip
which = " and ".join(apart)
lab.finding(
    f"After {STEPS} steps the format has moved the GPT's loss by {moved['GPT', 'bf16-mixed']:.4f} "
    f"(bf16-mixed) and {moved['GPT', 'fp16-mixed']:.4f} (fp16-mixed) on average and the BERT's by "
    f"{moved['BERT', 'bf16-mixed']:.4f} and {moved['BERT', 'fp16-mixed']:.4f}, while seeds are "
    f"{noise['GPT']:.4f} and {noise['BERT']:.4f} apart (standard deviation): "
    + (f"for {which} a format changes as much as a seed here." if apart else
       "the format matters less than the seed."),
    f"{STEPS} 步之后，数值格式使 GPT 的损失平均变化 {moved['GPT', 'bf16-mixed']:.4f}（bf16-mixed）和 "
    f"{moved['GPT', 'fp16-mixed']:.4f}（fp16-mixed），使 BERT 的损失平均变化 "
    f"{moved['BERT', 'bf16-mixed']:.4f} 和 {moved['BERT', 'fp16-mixed']:.4f}，而不同种子之间分别相差 "
    f"{noise['GPT']:.4f} 和 {noise['BERT']:.4f}（标准差）："
    + (f"这里对 {which} 来说，数值格式的影响与随机种子一样大。" if apart else "数值格式的影响小于随机种子。"),
    moved={f"{kind} {policy}": value for (kind, policy), value in moved.items()},
    noise=noise,
    losses={f"{kind} {policy}": found for (kind, policy), found in runs.items()},
)  # fmt: skip


# %%
def draw(figure):
    at = range(EVERY, STEPS + 1, EVERY)
    for axes, kind in zip(figure.subplots(2), noise, strict=True):
        for (policy, colour), style in zip(POLICIES.items(), ("-", "--", ":"), strict=True):
            found = torch.tensor(runs[kind, policy], dtype=torch.float64)
            low, high = found.min(0).values, found.max(0).values
            axes.fill_between(at, low, high, color=colour, alpha=0.12, lw=0)
            axes.plot(at, found.mean(0), style, color=colour, lw=2.4, label=policy)
        text = f"{kind}: validation loss ({SEEDS} seeds)", f"{kind}：验证损失（{SEEDS} 个种子）"
        axes.set_title(lab.say(*text))
        axes.legend()
    axes.set_xlabel(lab.say("step", "步"))


lab.figure(draw, 6.4, 6.4)

# %% [markdown] lang="en"
# The three lines lie on each other, and the band, the range of the seeds, is wider than what is between them.
#
# Change `STEPS` to 20: neither model has learned much, and the formats lie on each other just as well. Read on: [measured](../docs/measured.md),
# [the idea](../docs/concepts.md#quality).

# %% [markdown] lang="zh"
# 三条曲线重合；色带是不同种子的范围，比曲线之间的差别宽。
#
# 把 `STEPS` 改为 20：两个模型都还没学到多少，各格式的曲线同样重合。接着读：[实测](../docs/measured.zh.md)、[概念](../docs/concepts.zh.md#质量)。
