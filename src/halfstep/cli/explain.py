"""The command ``halfstep explain``: what a policy means, or one line for every policy."""

from __future__ import annotations

from halfstep.cli.commands import Explain
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain, explain_model
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import POLICIES, RECIPES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.shown import aligned
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
        pages = []  # all of them before the first is printed, as each may raise
        for text in named:
            pages.append(str(explain(text, device)))
            if model is not None:
                pages.append(str(explain_model(parse_policy(text, device), model)))
        print("\n\n".join(pages))
        return 0
    rows = [("policy", "bytes/param", "scale", f"on {device}")]
    for name, policy in {**POLICIES, **RECIPES}.items():
        size = f"{sum(bytes_per_parameter(policy).values()):g}"
        rows.append((name, size, policy.loss_scale.kind, support(policy, device).how))
    taken = choose(device)
    print(f"{aligned(rows, {1})}\n\nauto is {taken.policy} here: {taken.reason}.")
    print("halfstep explain POLICY shows one in full. Bytes are with AdamW.")
    return 0
