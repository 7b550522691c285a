"""What a simulated step below 16 bits costs: each policy's step over one of ``bf16-mixed``.

    python benchmarks/low_bit_cpu.py [--rounds N] [--policies NAME ...]

The model is gpt-small-cpu (6 layers, 384 wide) with a vocabulary of 8192, batch 8 x 256, on random
tokens. One model for each policy takes steps in turn in one process; ratios are medians over rounds
of a policy's step to the plain step of the same round.
"""

from __future__ import annotations

import argparse
from statistics import median, quantiles

from common import save
from halfstep.trainer.environment import keep_freed_memory
from watch_cpu import stepper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--policies", nargs="*", default=["mxfp8", "nvfp4", "fp8", "fp8-block"])
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()
    steps = {"bf16-mixed": stepper("bf16-mixed")[2]}
    held = [stepper(f"{policy},simulate=yes") for policy in arguments.policies]
    steps |= {policy: one[2] for policy, one in zip(arguments.policies, held, strict=True)}
    for step in steps.values():
        step(), step()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(arguments.rounds)]
    found = {}
    for name in arguments.policies:
        ratios = [one[name] / one["bf16-mixed"] for one in rounds]
        low, _, high = quantiles(ratios, n=4)
        found[name] = {"over_bf16_mixed": median(ratios), "quartiles": [low, high]}
        print(f"{name:10} {median(ratios):.2f} ({low:.2f} to {high:.2f}) of a bf16-mixed step")
    plain = median(one["bf16-mixed"] for one in rounds)
    print(f"bf16-mixed {1e3 * plain:.0f} ms")
    if not arguments.no_save:
        save("low_bit_cpu", {"ratios": found, "plain_ms": 1e3 * plain, "rounds": len(rounds)})


if __name__ == "__main__":
    main()
