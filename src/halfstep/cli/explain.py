"""The command ``halfstep explain``."""

from __future__ import annotations

import torch

from halfstep.cli.commands import Explain
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain, explain_model
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import ALIASES, POLICIES, RECIPES, PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.shown import padded
from halfstep.trainer.config.config import simulated
from halfstep.trainer.environment import choose_device
from halfstep.trainer.estimate import described_model


def run(arguments: Explain) -> int:
    """Print what each policy means, or one line for every policy."""
    device = choose_device(arguments.device)
    model, named = None, arguments.policies
    if arguments.config:
        config, model = described_model(
            arguments.config, "halfstep.explain_model(policy, model) answers for any model"
        )
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
    print(_every(device, simulate=arguments.simulate))
    taken = choose(device)
    print(f"\nauto is {taken.policy} here: {taken.reason}.")
    print("halfstep explain POLICY shows one in full. Bytes are with AdamW.")
    return 0


def _every(device: torch.device, *, simulate: bool) -> str:
    """Every policy, with its cost and how the device runs it, a line each."""
    heads = "policy", "aliases", "bytes/param", "scale"
    lines = [_line(*heads, f"on {device}")]
    for name, policy in {**POLICIES, **RECIPES}.items():
        found = support(_simulated(policy) if simulate else policy, device)
        aliases = ", ".join(alias for alias, target in ALIASES.items() if target == name)
        total = f"{sum(bytes_per_parameter(policy).values()):g}"
        how = found.how
        lines.append(_line(name, aliases, total, policy.loss_scale.kind, how))
    return "\n".join(lines)


def _line(name: str, aliases: str, size: str, scale: str, how: str) -> str:
    cells = padded(name, 12), padded(aliases, 36), padded(size, 11, right=True)
    return f"{' '.join(cells)}  {padded(scale, 8)} {how}"


def _simulated(policy: PrecisionPolicy) -> PrecisionPolicy:
    return simulated(policy) if policy.recipes() else policy
