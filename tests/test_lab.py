"""Every experiment runs in a tiny form, and is right; page and notebook follow the script."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from pathlib import Path
from statistics import fmean

import jupytext
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
LAB, DOCS = ROOT / "lab", ROOT / "docs"
sys.path.insert(0, str(ROOT / "scripts"))
import lab_page  # noqa: E402

NAMES = lab_page.ORDER


def run(name, folder, capsys, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LAB))
        patch.setattr(sys, "argv", [f"{name}.py", "--out", str(folder), *words])
        runpy.run_path(str(LAB / f"{name}.py"), run_name="__main__")
    found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return capsys.readouterr().out, found


def underflow(n, quick):
    small, large = (n["histogram"][key] for key in n["histogram"])
    for counts, lost in zip((small, large), n["zeros"].values(), strict=True):
        below = sum(count for e, count in counts.items() if int(e) < -25)
        assert lost[0] == below / sum(counts.values())
        assert lost == sorted(lost, reverse=True)
    of_small, of_large = n["zeros"].values()
    assert of_small[0] < of_large[0]
    # fp16's own rounding agrees at the border: a number just above 2^-25 survives, 2^-25 does not
    edge = torch.tensor([2.0**-25, 2.0**-25 * (1 + 2.0**-20)]).half()
    assert edge.tolist() == [0.0, 2.0**-24]
    tokens = [*n["tokens"].values()]
    mean = [sum(int(e) * c for e, c in h.items()) / sum(h.values()) for h in (small, large)]
    # k times the tokens make every gradient about k times smaller: within half a power of two
    assert mean[0] - mean[1] == pytest.approx(math.log2(tokens[1] / tokens[0]), abs=0.5)
    if not quick:
        assert 0.02 < of_small[0] < 0.25 < of_large[0] < 0.5


def loss_scale(n, quick):
    assert n["dynamic"][0]["skipped"]
    large = max(int(key.split()[0]) for key in n["far"])
    assert n["far"][f"{large} fp32"] == pytest.approx(0, abs=1e-4), "powers of two are exact"
    if not quick:  # only the large batch needs a scale, and then it does not matter which
        assert n["far"][f"{large} none"] > 0.2
        others = [far for key, far in n["far"].items() if key != f"{large} none"]
        assert max(map(abs, others)) < 0.15


def overflow(n, quick):
    losses = n["losses"]
    for size, fp32, bf16, *fp16 in zip(n["sizes"], *losses.values(), strict=True):
        # all are one function; LayerNorm's epsilon, 1e-5 beside a variance of 1e-3, is what differs
        assert fp32 == pytest.approx(losses["fp32"][0], abs=0.001)
        assert bf16 == pytest.approx(fp32, abs=0.01)
        for loss in fp16:
            assert (loss is None) == (size > 65504), size
            assert loss is None or loss == pytest.approx(fp32, abs=0.01)
    assert losses["fp16 1"].count(None) >= 2
    assert "layers.0." in n["cause"]


def lost_updates(n, quick):
    assert n["lost"].pop("bf16-pure") > 0.5
    assert max(n["lost"].values()) < 0.02
    assert n["loss"]["bf16-pure"] > n["loss"]["fp32"] + (0 if quick else 0.05)
    for policy in ("bf16-split", "bf16-kahan", "bf16-sr"):
        assert n["loss"][policy] == pytest.approx(n["loss"]["fp32"], abs=0.01)


def parity(n, quick):
    for kind in ("GPT", "BERT"):
        fp32 = [run[-1] for run in n["losses"][f"{kind} fp32"]]
        assert n["losses"][f"{kind} bf16-mixed"] != n["losses"][f"{kind} fp32"]
        for policy in ("bf16-mixed", "fp16-mixed"):
            other = [run[-1] for run in n["losses"][f"{kind} {policy}"]]
            far = fmean(abs(a - b) for a, b in zip(other, fp32, strict=True))
            assert n["moved"][f"{kind} {policy}"] == pytest.approx(far)
            assert far < 0.1
            assert quick or far < n["noise"][kind]
        assert n["noise"][kind] == pytest.approx(np.std(fp32, ddof=1))


def low_bit(n, quick):
    one, mean = n["one"], n["mean"]
    assert one["bf16"] < one["mxfp8"] < one["nvfp4"] / 2
    assert one["bf16"] < one["fp8"] < one["nvfp4"] / 2
    for name in one:  # nvfp4 rounds at random; to nearest it is the same error each time
        same = mean[name] == pytest.approx(one[name], rel=1e-9)
        assert same != name.startswith("nvfp4")
        assert mean[name] <= one[name] * (1 + 1e-9)
    assert one["nvfp4, 0 bf16"] < one["nvfp4"] * (1 if quick else 0.8)
    assert max(n["blocks"]) < one["nvfp4"]


def numbers(text):
    return {*re.findall(r"(?<![a-z\d.])[-+]?\d[\d.,]*(?<![.,])", text.replace("\u2212", "-"))}


def stands_there(name, found):
    """The check of an experiment, and that both languages say the same numbers."""
    if name in globals():  # the others show arithmetic whose tests stand elsewhere
        globals()[name](json.loads(json.dumps(found["numbers"])), found["quick"])
    if name not in ("overflow", "speed"):  # where a language says a number once more
        assert numbers(found["en"].replace("one sequence", "1")) == numbers(found["zh"])


CASES = [  # the experiment on communication starts processes, which cost more than all others
    pytest.param(name, lang, marks=[pytest.mark.slow] * ((name, lang) == ("communication", "zh")))
    for name in NAMES
    for lang in ("en", "zh")
]


@pytest.mark.parametrize(("name", "lang"), CASES)
def test_an_experiment_says_what_it_does_and_finds_what_is_true(name, lang, tmp_path, capsys):
    printed, found = run(name, tmp_path, capsys, "--quick", "--lang", lang)
    stands_there(name, found)
    before = printed.partition(found[lang])[0]
    assert re.search(r"(\.\.\.|……)$", before, re.M), "what it is doing"
    assert len(re.findall("^   ", before, re.M)) >= 2, "a table"
    assert ("。" in printed) == (lang == "zh")
    for suffix in ("", ".zh"):
        svg = (tmp_path / f"{name}{suffix}.svg").read_text(encoding="utf-8")
        assert bool(re.search(">[^<]*[\u4e00-\u9fff]", svg)) == (suffix == ".zh")


def test_a_notebook_shows_the_figure(monkeypatch):
    monkeypatch.syspath_prepend(str(LAB))
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    cells, names = jupytext.read(LAB / "formats.py").cells, {}
    exec("\n".join(cell.source for cell in cells if cell.cell_type == "code"), names)
    assert "Range" in names["lab"].figure(names["draw"], 6, 5)._repr_svg_()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_what_scripts_and_findings_make_of_it(language):
    page = (DOCS / f"lab{lab_page.SUFFIX[language]}.md").read_text(encoding="utf-8")
    assert page == lab_page.page(language), "run python scripts/lab_page.py"
    assert {path.stem for path in LAB.glob("*.py")} == {*NAMES, "course"}


@pytest.mark.parametrize("name", NAMES)
def test_the_findings_of_the_page_hold_at_full_size(name):
    found = json.loads((DOCS / lab_page.FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    assert not found["quick"]
    stands_there(name, found)
    if name == "underflow":  # the page on the loss scale has the same gradients
        shown = json.loads((DOCS / "javascripts" / "gradients.json").read_text(encoding="utf-8"))
        assert shown["data"] == found["numbers"]
