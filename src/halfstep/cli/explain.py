"""The command ``halfstep explain``."""

from __future__ import annotations

from dataclasses import replace

from halfstep.cli.commands import Explain
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import ALIASES, POLICIES, RECIPES, PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.environment import choose_device


def run(arguments: Explain) -> int:
    """Print what each policy means, or one line for every policy."""
    device = choose_device(arguments.device)
    if arguments.policies:
        # every error before the first page
        parsed = [(text, parse_policy(text, device)) for text in arguments.policies]
        pages = [_simulated(policy) if arguments.simulate else text for text, policy in parsed]
        print("\n\n".join(explain(page, device) for page in pages))
        return 0
    print(f"{'policy':<12} {'aliases':<36} {'bytes/param':>11}  {'scale':<8} on {device}")
    for name, policy in {**POLICIES, **RECIPES}.items():
        found = support(_simulated(policy) if arguments.simulate else policy, device)
        aliases = ", ".join(alias for alias, target in ALIASES.items() if target == name)
        total = sum(bytes_per_parameter(policy).values())
        print(
            f"{name:<12} {aliases:<36} {total:>11g}  {policy.loss_scale.kind:<8} "
            f"{found.status}: {found.reason}"
        )
    print(f"\nauto is {choose(device).policy} here: {choose(device).reason}.")
    print("halfstep explain POLICY shows one in full. Bytes are with AdamW.")
    return 0


def _simulated(policy: PrecisionPolicy) -> PrecisionPolicy:
    return replace(policy, simulate=True) if policy.recipes() else policy
