"""The command ``halfstep explain``."""

from __future__ import annotations

from halfstep.cli.commands import Explain
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain, explain_model
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import ALIASES, POLICIES, RECIPES, PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import simulated
from halfstep.trainer.environment import choose_device
from halfstep.trainer.estimate import described_model

_ANY_MODEL = "halfstep.explain_model(policy, model) answers for any model"


def run(arguments: Explain) -> int:
    """Print what each policy means, or one line for every policy."""
    device = choose_device(arguments.device)
    model, named = None, arguments.policies
    if arguments.config:
        config, model = described_model(arguments.config, _ANY_MODEL)
        named = named or (str(config.precision),)
    if named:
        # every error before the first page
        parsed = [(text, parse_policy(text, device)) for text in named]
        simulate = arguments.simulate
        if simulate and not any(policy.recipes() for _, policy in parsed):
            simulated(parsed[0][1])  # refuses
        pages = [_simulated(policy) if simulate else text for text, policy in parsed]
        texts = [str(explain(page, device)) for page in pages]
        if model is not None:
            placed = [explain_model(policy, model) for _, policy in parsed]
            texts = [f"{text}\n\n{table}" for text, table in zip(texts, placed, strict=True)]
        print("\n\n".join(texts))
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
    return simulated(policy) if policy.recipes() else policy
