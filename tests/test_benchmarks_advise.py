"""The trials of advise: their models are what they say, and docs show what was found."""

import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def trials(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import advise

    return advise


def test_planted_layers_see_outliers_and_the_function_is_the_same(trials):
    model, sensitive, batches = trials.planted(0)
    plain = trials.planted(0)[0]
    for block in plain:
        with torch.no_grad():
            block.linear.weight.mul_(block.scale)
        block.scale.fill_(1.0)
    x, y = batches[0]
    assert torch.allclose(model(x), plain(x), atol=1e-5)  # rounding of fp32, over eight blocks
    assert float((model(x) - y).detach().std()) == pytest.approx(trials.NOISE, rel=0.1)
    scaled = [number for number, block in enumerate(model) if (block.scale != 1).any()]
    assert scaled == sensitive
    assert len(sensitive) == 3
    for number in sensitive:
        # one in every block of 16 that shares a scale
        assert (model[number].scale.reshape(-1, 16) != 1).sum(1).tolist() == [1, 1, 1, 1]


def test_docs_show_what_the_trials_found(trials):
    content = json.loads((BENCHMARKS / "results" / "advise.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "advise.md").read_text()
    assert trials.table(content) in page
