# %% [markdown] lang="en"
# # Exponent bits buy range, mantissa bits buy fine gaps
#
# What do the bits of each format buy: how far do its numbers reach, and how close do they lie?
#
# A number is sign, exponent and mantissa. The exponent says between which powers of two it lies, the mantissa where between them: *m* bits make 2^m
# equal steps from each power to the next.

# %% [markdown] lang="zh"
# # 指数位决定范围，尾数位决定间隔
#
# 每种格式的各个位换来了什么：数能到多大、多小，又有多密？
#
# 一个数由符号、指数和尾数组成。指数说明它在哪两个 2 的幂之间，尾数说明它在其间的位置：*m* 位尾数把相邻两个幂之间分成 2^m 等份。

# %%
import math

import torch

from course import BLACK, BLUE, GREEN, ORANGE, PINK, Lab
from halfstep.formats import BF16, E2M1, E4M3FN, E5M2, FP16

lab = Lab("formats")
VALUE, AT = 0.1, 1.0  # the number that is rounded, and where the number line begins
FORMATS = {"bf16": BF16, "fp16": FP16, "e4m3fn": E4M3FN, "e5m2": E5M2, "e2m1": E2M1}
COLOURS = (BLUE, ORANGE, GREEN, PINK, BLACK)

# %%
lab.tell(f"Rounding {VALUE:g} to each format ...", f"把 {VALUE:g} 舍入到各种格式……")
rounded, bits = {}, {}
for name, form in FORMATS.items():
    rounded[name] = float(form.round_to(torch.tensor(VALUE, dtype=torch.float64)))
    sign, exponent, mantissa = form.bits_of(rounded[name])
    widths = form.exponent_bits, form.mantissa_bits
    bits[name] = f"{sign} {exponent:0{widths[0]}b} {mantissa:0{widths[1]}b}"


def numbers(form):
    """The numbers of a format from AT to a sixteenth more."""
    found = [float(form.round_to(torch.tensor(AT, dtype=torch.float64)))]
    while math.isfinite(found[-1]) and found[-1] <= AT * 1.0625:
        found.append(found[-1] + form.ulp(found[-1]))
    return [x for x in found if AT <= x <= AT * 1.0625]


lines = {name: numbers(form) for name, form in FORMATS.items()}

# %%
lab.table(
    lab.say("format,smallest,largest,gap at 1,bits", "格式,最小,最大,1 处的间隔,各个位").split(","),
    *(
        (name, f"2^{math.log2(form.min_subnormal):.0f}", f"{form.max:g}", form.eps, bits[name])
        for name, form in FORMATS.items()
    ),
)
ends = f"2^{math.log2(BF16.min_subnormal):.0f}", f"2^{math.log2(FP16.min_subnormal):.0f}"
steps = 2**BF16.mantissa_bits, 2**FP16.mantissa_bits
lab.finding(
    f"In 16 bits, bf16 reaches from {ends[0]} to {BF16.max:.3g} with {steps[0]} numbers from 1 to 2, "
    f"fp16 from {ends[1]} to {FP16.max:.0f} with {steps[1]}; of {VALUE:g}, bf16 keeps "
    f"{rounded['bf16']:.8g} and fp16 {rounded['fp16']:.8g}.",
    f"同为 16 位，bf16 的范围是 {ends[0]} 到 {BF16.max:.3g}，1 到 2 之间有 {steps[0]} 个数；"
    f"fp16 的范围是 {ends[1]} 到 {FP16.max:.0f}，1 到 2 之间有 {steps[1]} 个数；"
    f"{VALUE:g} 在 bf16 中是 {rounded['bf16']:.8g}，在 fp16 中是 {rounded['fp16']:.8g}。",
    rounded={name: str(value) for name, value in rounded.items()},
    bits=bits,
    lines=lines,
)


# %%
def draw(figure):
    ranges, line = figure.subplots(2)
    for row, (form, colour) in enumerate(zip(FORMATS.values(), COLOURS, strict=True)):
        least, normal, largest = map(math.log2, (form.min_subnormal, form.min_normal, form.max))
        ranges.barh(row, largest - normal, left=normal, color=colour, height=0.6)
        ranges.barh(row, normal - least, left=least, color=colour, height=0.6, alpha=0.35)
        line.vlines(lines[[*FORMATS][row]], row - 0.32, row + 0.32, color=colour, lw=1.6)
    for axes in (ranges, line):
        axes.set_yticks(range(len(FORMATS)), FORMATS)
        axes.set_ylim(len(FORMATS) - 0.4, -0.6)
    ranges.set_title(lab.say("Range (pale: subnormal)", "范围（浅色为次正规数）"))
    ranges.set_xlabel(lab.say("log2 of the number", "数的大小（log2）"))
    end = AT * 1.0625
    line.set_title(lab.say(f"All numbers from {AT:g} to {end:g}", f"从 {AT:g} 到 {end:g} 的所有数"))


lab.figure(draw, 6.4, 5.6)

# %% [markdown] lang="en"
# With the same 16 bits, bf16 has the range of fp32 and few numbers; fp16 has eight times as many numbers and a short range.
#
# Change `VALUE` to 70000: fp16 and e5m2 become inf, and bf16 keeps 70144. Change `AT` to 1000: bf16 has a number at every fourth integer only. Read
# on: [the number line](../docs/number-line.md), [the idea](../docs/concepts.md#formats-range-and-precision).

# %% [markdown] lang="zh"
# 同样是 16 位，bf16 有 fp32 的范围，但数很稀；fp16 的数密 8 倍，但范围很短。
#
# 把 `VALUE` 改为 70000：fp16 和 e5m2 变成 inf，而 bf16 保留 70144。把 `AT` 改为 1000：bf16 每 4 个整数才有一个数。接着读：[数轴](../docs/number-line.zh.md)、[概念](../docs/concepts.zh.md#数值格式范围与精度)。
