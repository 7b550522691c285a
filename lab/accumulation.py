# %% [markdown] lang="en"
# # Sums in 16 bits drift and stand still
#
# What happens when many small numbers are added up in 16 bits: in a sum, in a matrix product, in gradients of micro-batches?
#
# First one sum, each result rounded to the format. Then a matrix product of positive numbers. A product of two bf16 numbers is exact in fp32, so
# only the additions round. Last the gradients of a GPT: `bf16-pure` adds those of micro-batches in bf16, `bf16-split` in fp32.

# %% [markdown] lang="zh"
# # 16 位求和会漂移，然后停住不动
#
# 用 16 位累加许多小数会怎样：单独求和、矩阵乘法内部、以及多个微批次的梯度累积？
#
# 先看单独一个和，每次结果都舍入到该格式。再看正数矩阵的乘法。两个 bf16 数的乘积在 fp32 中是精确的，所以只有加法会舍入。最后看 GPT 的梯度：`bf16-pure` 用 bf16 累加微批次的梯度，`bf16-split` 用 fp32。

# %%
import torch

from course import BLACK, BLUE, ORANGE, SKY, Lab, Transformer, batches, train
from halfstep import Precision
from halfstep.optim import AdamW

lab = Lab("accumulation")
TERM, LENGTH, MICRO_BATCHES = (1e-3, 256, 4) if lab.quick else (1e-3, 4096, 64)
TERMS = 1000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# %%
lab.tell(f"Adding {TERM:g} {TERMS} times ...", f"把 {TERM:g} 加 {TERMS} 次……")
sums = {}
for name, dtype in DTYPES.items():
    total, term = torch.zeros((), dtype=dtype), torch.tensor(TERM, dtype=dtype)
    sums[name] = [0.0]
    for _ in range(TERMS):
        total = total + term
        sums[name].append(total.item())


# %%
def product_error(accumulator, length):
    """Relative error of a bf16 product whose sums are kept in a dtype, against fp64."""
    generator = torch.Generator().manual_seed(length)
    a = torch.rand(16, length, generator=generator).bfloat16()
    b = torch.rand(length, 16, generator=generator).bfloat16()
    total = torch.zeros(16, 16, dtype=accumulator)
    for k in range(length):
        total = (total.float() + a[:, k, None].float() * b[k].float()).to(accumulator)
    exact = a.double() @ b.double()
    return float((total.bfloat16().double() - exact).norm() / exact.norm())


lab.tell("Multiplying matrices ...", "做矩阵乘法……")
lengths = [4**i for i in range(1, 12) if 4**i < LENGTH] + [LENGTH]
products = {n: [product_error(DTYPES[n], k) for k in lengths] for n in ("bf16", "fp32")}

# %%
weights = Transformer(1, 32, 64) if lab.quick else Transformer(2, 64, 64)
lab.tell("Adding up the gradients of a GPT ...", "累加 GPT 的梯度……")
for _ in train("fp32", weights, 2 if lab.quick else 30, 3e-3, batches(8, 64, seed=0)):
    pass
counts = [2**i for i in range(20) if 2**i < MICRO_BATCHES] + [MICRO_BATCHES]


def gradient_errors(policy):
    """Relative error of the gradient after some micro-batches, against their sum in fp64."""
    model = Transformer(1, 32, 64) if lab.quick else Transformer(2, 64, 64)
    model.load_state_dict(weights.state_dict())
    data, exact, errors = batches(1, 64, seed=1), 0.0, []
    several = [next(data) for _ in range(MICRO_BATCHES)]
    with Precision(policy, model, AdamW(model.parameters())) as precision:

        def backward(batch):
            with precision.autocast():
                loss = model.loss(batch) / MICRO_BATCHES
            precision.backward(loss)
            return torch.cat([p.grad.double().flatten() for p in model.parameters()])

        truths = []
        for batch in several:
            exact = exact + backward(batch)
            truths.append(exact)
            precision.discard()
        for batch, truth in zip(several, truths, strict=True):
            errors.append(float((backward(batch) - truth).norm() / truth.norm()))
        precision.discard()
    return [errors[count - 1] for count in counts]


gradients = {"bf16": gradient_errors("bf16-pure"), "fp32": gradient_errors("bf16-split")}

# %%
head = lab.say("sums in,sum,product is off,gradient is off", "累加格式,和,乘积误差,梯度误差")
rows = (
    (n, f"{sums[n][-1]:.4g}", f"{products[n][-1]:.2%}", f"{gradients[n][-1]:.2g}") for n in products
)
lab.table(head.split(","), *rows)
lab.finding(
    f"{TERMS} times {TERM:g} is {sums['bf16'][-1]:.4g} in a bf16 sum and {TERMS * TERM:.4g} in truth; "
    f"with bf16 sums a product of length {LENGTH} is off by {products['bf16'][-1]:.1%} (with fp32 sums "
    f"by {products['fp32'][-1]:.2%}), and the gradient of {MICRO_BATCHES} micro-batches by "
    f"{gradients['bf16'][-1]:.2%} (with fp32 sums by {gradients['fp32'][-1]:.0e} of its norm).",
    f"{TERMS} 个 {TERM:g} 用 bf16 累加得 {sums['bf16'][-1]:.4g}，真值为 {TERMS * TERM:.4g}；"
    f"长度为 {LENGTH} 的矩阵乘法用 bf16 累加误差为 {products['bf16'][-1]:.1%}"
    f"（fp32 累加为 {products['fp32'][-1]:.2%}），{MICRO_BATCHES} 个微批次的梯度误差为 "
    f"{gradients['bf16'][-1]:.2%}（fp32 累加时仅为范数的 {gradients['fp32'][-1]:.0e}）。",
    sums=sums,
    products=products,
    gradients=gradients,
)


# %%
def draw(figure):
    alone, product, gradient = figure.subplots(3)
    for name, colour in (("bf16", BLUE), ("fp16", ORANGE), ("fp32", BLACK)):
        alone.plot(sums[name], color=colour, lw=2.4, label=f"{name}: {sums[name][-1]:.4g}")
    for axes, at, found in ((product, lengths, products), (gradient, counts, gradients)):
        for name, colour in (("bf16", BLUE), ("fp32", SKY)):
            label = lab.say(f"sums in {name}", f"用 {name} 累加")
            axes.plot(at, [100 * x for x in found[name]], "-o", color=colour, label=label)
        axes.set_xscale("log", base=2)
    alone.set_title(lab.say(f"{TERMS} terms of {TERM:g}", f"{TERMS} 个 {TERM:g} 逐个累加"))
    text = "A product of bf16 matrices: error, %", "bf16 矩阵乘法的误差，%"
    product.set(
        yscale="log", title=lab.say(*text), xlabel=lab.say("length of each sum", "求和的长度")
    )
    gradient.set_title(lab.say("Gradients of a GPT: error, %", "GPT 的梯度误差，%"))
    gradient.set_xlabel(lab.say("micro-batches", "微批次个数"))
    for axes in (alone, product, gradient):
        axes.legend()


lab.figure(draw, 6.4, 8.4)

# %% [markdown] lang="en"
# The blue line of the first panel runs at twice the slope, and then stands still: between 0.25 and 0.5 the gap of bf16 is 2⁻⁹, and 0.001 rounds up
# to a whole gap; from 0.5 on it is less than half a gap, and rounds to nothing.
#
# Change `TERM` to 0.0009765625, a power of two: bf16 adds without any error up to 0.25, and then stands still there. Read on: [the
# idea](../docs/concepts.md#sums-in-fp32).

# %% [markdown] lang="zh"
# 看第一幅的蓝线：先以两倍斜率上升，随后停住不动。在 0.25 到 0.5 之间 bf16 的间隔是 2⁻⁹，0.001 被进位成一整个间隔；到 0.5 以后 0.001 不足半个间隔，被舍成零。
#
# 把 `TERM` 改为 0.0009765625（2 的幂）：bf16 在 0.25 之前的累加毫无误差，然后就停在 0.25。接着读：[概念](../docs/concepts.zh.md#用-fp32-求和)。
