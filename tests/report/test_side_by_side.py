"""Several precisions side by side: the sentence, and a figure that stands alone."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib import font_manager

from halfstep.report import figures
from halfstep.report.side_by_side import Side, Trial, draw, verdict


def side(precision, rate, peak, loss, **more):
    return Side(**{
        "precision": precision, "simulated": False, "steps": [1, 2, 3], "losses": [3.0, 2.5, loss],
        "val_loss": loss, "rate": rate, "quartiles": (rate, rate), "peak_bytes": peak,
        "skipped": 0, "seconds": 1.0, **more,
    })  # fmt: skip


FP32 = side("fp32", 1000.0, 800_000_000, 2.0)
BF16 = side("bf16-mixed", 2200.0, 600_000_000, 2.01)
TRIAL = Trial(model="a-gpt", parameters=1234, steps=3, device="a CPU")
FP16 = side("fp16-mixed", 900.0, 810_000_000, 1.99, simulated=True)


def test_the_sentence_is_about_the_fastest_of_the_others():
    assert verdict([FP32, FP16, BF16]) == (
        "Beside fp32, bf16-mixed trains 2.20 times as many tokens per second in 25% less memory, "
        "and its validation loss differs by +0.50%."
    )


def test_a_slower_and_larger_one_is_not_flattered():
    said = verdict([FP32, replace(FP16, simulated=False)])
    assert "0.90 times" in said
    assert "1% more memory" in said
    assert "-0.50%" in said


def test_the_speed_of_a_simulated_one_is_not_told():
    faster = replace(FP16, rate=5000.0)
    assert verdict([FP32, faster]) == (
        "fp16-mixed is simulated on this processor, so that its speed says nothing of other "
        "devices; its validation loss differs from that of fp32 by -0.50%."
    )
    assert "bf16-mixed trains 2.20 times" in verdict([FP32, faster, BF16])


@pytest.fixture
def drawn(tmp_path):
    def make(language="en", sides=(FP32, BF16, FP16)):
        png, svg = draw(sides, TRIAL, tmp_path, language)
        assert png.read_bytes().startswith(b"\x89PNG")
        return svg.read_text(encoding="utf-8")

    return make


def texts(svg):
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(each.itertext()).strip() for each in found]


def test_the_figure_says_every_number(drawn):
    shown = " ".join(texts(drawn()))
    for told in ("fp32: 2.0000", "bf16-mixed: 2.0100", "1,000", "2,200", "900", "800", "600",
                 "810", "fp16-mixed*", "simulated",
                 "a-gpt, 1,234 parameters, 3 steps on a CPU"):  # fmt: skip
        assert told in shown, told
    assert "simulated" not in " ".join(texts(drawn(sides=(FP32, BF16))))


def test_the_picture_needs_no_page_around_it(drawn):
    svg = drawn()
    assert "var(--" not in svg
    for placeholder in (figures.INK, figures.PAPER, figures.GRID):
        assert placeholder not in svg
    families = set(re.findall(r"font-family: ([^;\"]*)", svg))
    assert len(families) == 1
    assert families.pop().endswith("sans-serif")
    assert svg == drawn()  # the same figure is the same file


def test_chinese_where_a_font_has_it_and_english_elsewhere(drawn, monkeypatch):
    there = {font.name for font in font_manager.fontManager.ttflist}
    shown = texts(drawn("zh"))
    assert ("内存峰值（MB）" in shown) == bool(there & set(figures._CHINESE_FONTS))
    monkeypatch.setattr(figures, "_CHINESE_FONTS", ())
    assert "Peak memory, MB" in texts(drawn("zh"))
