"""What a simulated step below 16 bits costs: each policy's step over one of ``bf16-mixed``.

    python benchmarks/low_bit_cpu.py [--rounds N] [--policies NAME ...] [--compile] [--no-peer]

The model is gpt-small-cpu (6 layers, 384 wide) with a vocabulary of 8192, batch 8 x 256, on random
tokens. One model for each policy takes steps in turn in one process; ratios are medians over rounds
of a policy's step to the plain step of the same round. Where torchao is installed (0.18), its
emulation of MXFP8 takes steps of the same model under ``bf16-mixed`` as well.
"""

from __future__ import annotations

import argparse
import importlib.util
from functools import partial
from statistics import median, quantiles

import torch
from torch import nn

from common import save
from halfstep.trainer.environment import keep_freed_memory
from watch_cpu import stepper


def of_torchao():
    """A step of ``bf16-mixed`` whose linear layers are torchao's, emulated."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = _to_mxfp8_then_scaled_mm(
            x.bfloat16(),
            layer.weight.bfloat16(),
            kernel_preference=KernelPreference.EMULATED,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
        )
        return y + layer.bias.to(y.dtype)

    model, precision, step = stepper("bf16-mixed")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(forward, module)
    return model, precision, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--policies", nargs="*", default=["mxfp8", "nvfp4", "fp8", "fp8-block"])
    parser.add_argument("--compile", action="store_true", help="every policy's model compiled too")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()
    steps = {"bf16-mixed": stepper("bf16-mixed")[2]}
    held = [stepper(f"{policy},simulate=yes") for policy in arguments.policies]
    steps |= {policy: one[2] for policy, one in zip(arguments.policies, held, strict=True)}
    if arguments.compile:
        for name in [*steps]:
            policy = name if name == "bf16-mixed" else f"{name},simulate=yes"
            held.append(stepper(policy, torch.compile))
            steps[f"{name} compiled"] = held[-1][2]
    if not arguments.no_peer and importlib.util.find_spec("torchao"):
        held.append(of_torchao())
        steps["torchao mxfp8"] = held[-1][2]
    for step in steps.values():
        step(), step()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(arguments.rounds)]
    found = {}
    for name in [*steps][1:]:
        ratios = [one[name] / one["bf16-mixed"] for one in rounds]
        low, _, high = quantiles(ratios, n=4)
        found[name] = {"over_bf16_mixed": median(ratios), "quartiles": [low, high]}
        print(f"{name:13} {median(ratios):.2f} ({low:.2f} to {high:.2f}) of a bf16-mixed step")
    plain = median(one["bf16-mixed"] for one in rounds)
    print(f"bf16-mixed {1e3 * plain:.0f} ms")
    if not arguments.no_save:
        kept = {"ratios": found, "plain_ms": 1e3 * plain, "rounds": len(rounds)}
        print(f"written: {save('low-bit-cpu', kept, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
