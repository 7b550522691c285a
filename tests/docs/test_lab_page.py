"""The page of the course: what stands on it follows from the numbers beside its figures."""

from __future__ import annotations

import json
import sys

import pytest
from tests.docs.blocks import DOCS, ROOT

from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiment import PHRASES
from lab import test_loss_scale, test_lost_updates, test_overflow, test_underflow

sys.path.insert(0, str(ROOT / "scripts"))
import lab_page

LANGUAGES = {"en": "", "zh": ".zh"}
FOUND = {
    name: json.loads((DOCS / lab_page.FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    for name in EXPERIMENTS
}


@pytest.mark.parametrize(("language", "suffix"), LANGUAGES.items())
def test_the_page_is_what_the_numbers_make_of_it(language, suffix):
    text = (DOCS / f"lab{suffix}.md").read_text(encoding="utf-8")
    assert text == lab_page.page(language), "run python scripts/lab_page.py"
    for name, found in FOUND.items():
        assert PHRASES[f"{name}.question"][language] in text
        assert f"halfstep lab {name}\n" in text
        assert f"({lab_page.FIGURES}/{name}{suffix}.svg)" in text
        assert lab_page.made_of(found).verdict(language) in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_are_there_in_both_languages_and_at_full_size(name):
    found = FOUND[name]
    options = lab_page.made_of(found).options
    assert options == EXPERIMENTS[name].options(), "measured with what a reader has"
    for language, suffix in LANGUAGES.items():
        svg = (DOCS / lab_page.FIGURES / f"{name}{suffix}.svg").read_text(encoding="utf-8")
        assert f">{PHRASES[f'{name}.title'][language]}<" in svg
        assert "http://" not in svg.partition("<g id")[2].replace("http://www.w3.org", "")
    assert {"processor", "cores", "bf16_instructions", "torch"} <= set(found["machine"])


def test_the_claims_hold_for_the_numbers_of_the_figures():
    test_underflow.require_claims(FOUND["underflow"]["data"], 16, 96)
    test_loss_scale.require_claims(FOUND["loss-scale"]["data"])
    test_overflow.require_claims(FOUND["overflow"]["data"])
    test_lost_updates.require_claims(FOUND["lost-updates"]["data"])
    bars = FOUND["memory"]["data"]["bytes"]
    total = {p: sum(sum(forms.values()) for forms in bars[p].values()) for p in bars}
    assert 0.7 < total["bf16-mixed"] / total["fp32"] < 1
    sent = FOUND["communication"]["data"]["sent"]
    assert sent["bf16"] * 2 == pytest.approx(sent["fp32"], rel=0.01)
    errors = FOUND["low-bit"]["data"]["errors"]
    assert errors["bf16"]["one"] < errors["mxfp8"]["one"] < errors["nvfp4"]["one"] / 2
    assert errors["kept"]["one"] < errors["nvfp4"]["one"] / 2
    sentence = lab_page.made_of(FOUND["parity"]).verdict("en")
    assert sentence.endswith("the format matters less than the seed.")
