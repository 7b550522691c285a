"""examples/gpt2_lora.py: what it says of itself is true."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest
import torch
from tests.trainer.lm_folders import save_base

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt2_lora.py"
# peft asks transformers for a name that the latter wants to retire
OURS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def main():
    found = runpy.run_path(str(EXAMPLE))["main"]
    found.__globals__.update(BASE_STEPS=30, STEPS=12)
    return found


@pytest.fixture
def trained(main, monkeypatch):
    """What the example has trained, last of all, with its ids."""
    train, seen = main.__globals__["train"], []

    def watched(model, policy, ids, steps, rate):
        seen[:] = model, ids
        return train(model, policy, ids, steps, rate)

    monkeypatch.setitem(main.__globals__, "train", watched)
    return seen


def loss_of(model, ids):
    """The loss of the same 64 windows, whoever asks."""
    starts = torch.linspace(0, len(ids) - 66, 64).long().tolist()
    windows = torch.stack([ids[start : start + 65] for start in starts])
    with torch.no_grad():
        logits = model.float()(windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


@OURS
@pytest.mark.parametrize("policy", ["fp16-mixed", pytest.param("fp32", marks=pytest.mark.slow)])
def test_adapters_learn_beside_a_frozen_base(main, trained, policy, capsys):
    results, before, after = main(policy=policy)
    model, ids = trained
    with_adapters = loss_of(copy.deepcopy(model), ids)
    with model.disable_adapter():
        assert with_adapters < loss_of(copy.deepcopy(model), ids) - 0.01
    assert all(result.applied for result in results)
    assert {result.loss_scale for result in results} == {65536 if policy == "fp16-mixed" else 1}
    # unscaled: of the size that a loss near 3 has, not 2^16 times that
    assert all(1e-3 < result.grad_norm < 10 for result in results)
    assert {weight.dtype for weight in before.values()} == {torch.float16}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    adapters = {name: w for name, w in after.items() if ".lora_" in name}
    assert len(adapters) == 2 * 4 * 2  # two matrices beside each of four in each of two layers
    assert {w.dtype for w in adapters.values()} == {torch.float32}
    assert all(w.any() for w in adapters.values())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "16,384 of 136,960 weights trained; the frozen ones are torch.float16 as before, bit for "
        "bit"
    )


@OURS
def test_any_gpt2_folder_will_do(main, tmp_path):
    results, before, after = main(str(save_base(tmp_path / "m", "GPT2")))
    assert results[-1].loss < results[0].loss
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
