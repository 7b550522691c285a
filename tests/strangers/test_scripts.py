"""The classic scripts train under every policy what they train in plain torch, or are refused."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from functools import cache

import pytest

import halfstep
from halfstep.errors import HalfstepError
from strangers.loops import POLICIES
from strangers.losses import Beside, Prepare
from strangers.scripts.edits import SCRIPTS, Script, apply

pytestmark = pytest.mark.strangers


def execute(script: Script, source: str, **given: object) -> list[float]:
    """Run the source's ``main`` as a module of its own, so that its classes can be pickled."""
    name = f"strangers.scripts.{script.module}_as_run"
    module = types.ModuleType(name)
    module.__dict__.update(given)
    sys.modules[name] = module
    arguments, sys.argv = sys.argv, [f"{script.module}.py"]
    try:
        exec(compile(source, f"{script.module}.py, edited", "exec"), module.__dict__)
        with contextlib.redirect_stdout(io.StringIO()):
            return module.main()
    finally:
        sys.argv = arguments
        del sys.modules[name]


@cache
def beside(name: str) -> Beside:
    script = SCRIPTS[name]
    source = apply(script.source, script.watch)

    def train(prepare: Prepare) -> list[float]:
        return execute(script, source, prepare=prepare)

    return Beside(train)


def verdict(name: str, policy: str) -> tuple[str, str]:
    """``equal``, ``refused``, ``raw`` or ``silent``, and what was seen."""
    script = SCRIPTS[name]
    own = halfstep.parse_policy(policy).needs_own_optimizer
    try:
        losses = execute(script, script.edited(own), policy=policy)
    except HalfstepError as error:
        return "refused", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    told = beside(name).apart(policy, losses)
    return ("silent", told) if told else ("equal", f"{beside(name).ratio(policy, losses):.2f}")


NO_EPS = "the optimizer's eps=1e-08 is too small for fp16"
FP16_PURE = "fp16-pure,init_scale=256"
REFUSED = {
    "nanogpt": {FP16_PURE: NO_EPS},
}
"""Script, policy and the reason for every cell that does not train."""


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore:the second moments of:UserWarning")  # it says what it does
def test_a_script_under_every_policy(name):
    found = {policy: verdict(name, policy) for policy in POLICIES}
    wrong = {p: v for p, v in found.items() if v[0] in ("silent", "raw")}
    assert not wrong
    expected = REFUSED.get(name, {})
    assert {p for p, (kind, _) in found.items() if kind == "refused"} == set(expected)
    for policy, reason in expected.items():
        assert reason in found[policy][1]
    lines = ["+{} -{}".format(*SCRIPTS[name].lines_changed())]
    if SCRIPTS[name].own:
        lines.append("+{} -{} for halfstep's optimizers".format(*SCRIPTS[name].lines_changed(True)))
    trained = len(found) - len(expected)
    print(f"\n{name}: {trained} trained, {len(expected)} refused; lines", ", ".join(lines))


@pytest.mark.parametrize("name", SCRIPTS)
def test_few_lines_are_changed(name):
    """Lines that are only indented under ``autocast`` count too."""
    added, removed = SCRIPTS[name].lines_changed(own=True)
    assert "halfstep" not in SCRIPTS[name].source
    assert 0 < removed <= added <= 28


LOST = [
    ("nanogpt", '        optimizer.load_state_dict(checkpoint["optimizer"])\n'),
    (
        "nanogpt",
        """\
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
""",
    ),
]
"""A line of each script without which it trains something else."""


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed,init_scale=256"])
@pytest.mark.parametrize(("name", "lost"), LOST)
def test_a_line_that_is_lost_is_seen(name, lost, policy):
    script = SCRIPTS[name]
    losses = execute(script, apply(script.edited(), [(lost, "")]), policy=policy)
    assert beside(name).apart(policy, losses)
