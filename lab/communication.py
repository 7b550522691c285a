# %% [markdown] lang="en"
# # Gradients sent in 16 bits: half the bytes
#
# How many bytes of gradients does a rank send in a step, and what does it cost to send them in 16 bits?
#
# Each rank has the same GPT and a batch of its own. `reduce=bf16` in the policy rounds gradients to bf16 before they are sent, and their sum once
# more. Of n ranks each sends 2 (n - 1) / n of its gradients.

# %% [markdown] lang="zh"
# # 用 16 位发送梯度：字节数减半
#
# 每一步每个进程要发送多少字节的梯度？改用 16 位发送的代价是什么？
#
# 每个进程有同样的 GPT 和自己的批次。策略中的 `reduce=bf16` 在发送前把梯度舍入到 bf16，求和后再舍入一次。n 个进程中，每个进程发送其梯度的 2 (n - 1) / n。

# %%
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

import course
from course import BLACK, BLUE, ORANGE, Lab, Transformer, batches, train
from halfstep import Precision
from halfstep.distributed import Layout, ParallelPlan, choose_strategy, open_world
from halfstep.optim import AdamW

lab = Lab("communication")
RANKS, WIDTH, LENGTH = (2, 32, 16) if lab.quick else (2, 128, 64)
WIRES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number


# %%
def summed(world, wire, seed):
    """The gradient of all ranks' batches in a format on the wire, in fp64."""
    policy, model = f"bf16-mixed,reduce={wire}", Transformer(2, WIDTH, LENGTH)
    for _ in train("fp32", model, 1 if lab.quick else 20, 3e-3, batches(8, LENGTH, seed=0)):
        pass
    strategy = choose_strategy(Layout(data=world.size), policy, torch.device("cpu"))
    strategy.place_(model, ParallelPlan(blocks=tuple(model.layers)))
    precision = Precision(policy, model, AdamW(model.parameters()), ranks=strategy.ranks)
    strategy.attach_(precision)
    with strategy.micro_batch(last=True), precision.autocast():
        own = next(batches(4, LENGTH, seed=1000 * seed + world.rank))
        precision.backward(model.loss(own) / world.size)
    strategy.finish()
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    precision.discard()
    precision.close()
    return gradient


def rank():
    """What one rank does; rank 0 prints what it found."""
    torch.set_num_threads(1)
    with open_world("cpu") as world:
        sums = {wire: summed(world, wire, seed=1) for wire in WIRES}
        exact, other = sums["fp32"], summed(world, "fp32", seed=2)
        errors = {wire: float((g - exact).norm() / exact.norm()) for wire, g in sums.items()}
        noise = float((other - exact).norm() / exact.norm())
        if world.is_main:
            print(json.dumps({"errors": errors, "noise": noise, "numbers": len(exact)}))


if "RANK" in os.environ:  # this is one of the processes that the lines below start
    sys.exit(rank())

lab.tell(f"Starting {RANKS} processes ...", f"启动 {RANKS} 个进程……")
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
meet = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
command = [sys.executable, str(Path(course.__file__).with_name("communication.py"))]
command += ["--quick"] * lab.quick
started = [
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                     env={**meet, "RANK": str(number), "LOCAL_RANK": str(number)})
    for number in range(RANKS)
]  # fmt: skip
printed = [process.communicate()[0] for process in started]
found = json.loads(printed[0].splitlines()[-1])

# %%
sent = {w: 2 * (RANKS - 1) / RANKS * found["numbers"] * size / 1e6 for w, size in WIRES.items()}
errors, noise = found["errors"], found["noise"]
head = lab.say("on the wire,MB sent,gradient is off", "传输格式,发送的 MB,梯度误差").split(",")
lab.table(head, *((wire, f"{sent[wire]:.2f}", f"{errors[wire]:.3%}") for wire in WIRES))
lab.finding(
    f"With reduce=bf16 each of {RANKS} ranks sends {sent['bf16']:.2f} MB in a step instead of "
    f"{sent['fp32']:.2f} MB; the summed gradient is off by {errors['bf16']:.2%} of its norm, and another "
    f"batch changes it by {noise:.0%}.",
    f"使用 reduce=bf16 时，{RANKS} 个进程中每个进程每一步发送 {sent['bf16']:.2f} MB，而 fp32 为 "
    f"{sent['fp32']:.2f} MB；求和后的梯度误差是其范数的 {errors['bf16']:.2%}，"
    f"而换一个批次带来的变化为 {noise:.0%}。",
    sent=sent,
    errors=errors,
    noise=noise,
)


# %%
def draw(figure):
    above, below = figure.subplots(2)
    colours = BLACK, BLUE, ORANGE
    above.barh([*sent], [*sent.values()], 0.6, color=colours)
    off = [100 * max(error, 1e-5) for error in errors.values()]
    below.barh([*errors], off, 0.6, color=colours)
    below.axvline(100 * noise, color=BLACK, ls="--")
    below.text(90 * noise, 0, lab.say("another batch", "换一个批次"), ha="right", va="center")
    below.set_xscale("log")
    for axes in (above, below):
        axes.invert_yaxis()
    above.set_title(lab.say("MB that each rank sends in a step", "每个进程每一步发送的 MB"))
    below.set_title(
        lab.say("error of the summed gradient, % of its norm", "求和后梯度的误差，占范数的 %")
    )


lab.figure(draw, 6.4, 4.4)

# %% [markdown] lang="en"
# The bars above are halved; below, the dashed line is what another batch changes in the same gradient.
#
# Change `RANKS` to 3: each of them sends a third more. Change `WIDTH` to 256: nearly four times as many bytes are sent, since they grow with the
# weights. Read on: [many devices](../docs/distributed.md), [the idea](../docs/concepts.md#communication).

# %% [markdown] lang="zh"
# 上图的条形减半；下图的虚线是换一个批次给同一梯度带来的变化。
#
# 把 `RANKS` 改为 3：每个进程多发送三分之一。把 `WIDTH` 改为 256：要发送的字节接近四倍，它随权重数量增长。接着读：[多设备](../docs/distributed.zh.md)、[概念](../docs/concepts.zh.md#通信)。
