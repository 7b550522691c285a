"""Formats that matter less than a seed, and recipes below 16 bits that are further off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from halfstep.errors import DataError
from halfstep.lab.figure import draw
from lab.drawn import assert_drawn, made


@pytest.fixture(scope="module")
def parity():
    return made("parity", steps=12, seeds=2)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_fp16_and_bf16_are_close_to_fp32_with_the_same_seed(parity, kind):
    losses = parity.data["losses"][kind]
    for name in ("bf16", "fp16"):
        for run, fp32 in zip(losses[name], losses["fp32"], strict=True):
            assert run != fp32  # it is another format
            # a dozen steps of relative error 2^-9 in a loss of about 4
            assert run[-1] == pytest.approx(fp32[-1], abs=0.05)
    assert all(run[-1] < run[0] for run in losses["fp32"])
    assert losses["fp32"][0] != losses["fp32"][1]
    assert losses["bf16"] != losses["fp16"]


def test_a_file_of_ones_own_is_what_the_model_learns(tmp_path):
    labelled, text = tmp_path / "posts.csv", tmp_path / "book.txt"
    rows = [f"{'good' if i % 3 else 'bad'} film {i},{'yes' if i % 3 else 'no'}" for i in range(60)]
    labelled.write_text("text,label\n" + "\n".join(rows))
    text.write_bytes(b"abcd" * 4000)
    usual, posts, book = (
        made("parity", steps=10, seeds=1, **data).data["losses"]
        for data in ({}, {"data": labelled}, {"data": text})
    )
    assert posts["gpt"] == usual["gpt"]
    assert book["bert"] == usual["bert"]
    assert posts["bert"]["fp32"][0][0] < math.log(2) + 0.3 < usual["bert"]["fp32"][0][0]
    # After ten steps it has begun to learn that there are four bytes.
    assert book["gpt"]["fp32"][0][-1] < usual["gpt"]["fp32"][0][-1] - 1
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match="at least 10000"):
        made("parity", data=tmp_path / "short.txt")
    with pytest.raises(DataError, match="give a file of text"):
        made("parity", data=tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("book.txt", ("abcd" * 4000, "efgh" * 4000)),
        ("posts.csv", ["text,label\n" + f"{word},x\n{word} two,y\n" * 30 for word in ("a", "bc")]),
    ],
)
def test_a_file_that_has_changed_is_read_anew(tmp_path, name, contents):
    """As in a notebook, where one process makes the experiment again."""
    path, seen = tmp_path / name, []
    for content in contents:
        path.write_text(content)
        seen.append(made("parity", steps=1, seeds=1, data=path).data["losses"])
    assert seen[0] != seen[1]


def test_the_sentence_on_parity_follows_the_numbers(parity):
    steps, losses = parity.data["steps"], {"fp32": [[2.0], [2.4]], "bf16": [[2.01], [2.4]]}
    near = {**losses, "fp16": [[2.0], [2.38]]}
    data = {**parity.data, "steps": steps[-1:], "losses": {"gpt": near, "bert": near}}
    said = replace(parity, data=data).verdict("en")
    assert "the GPT's loss by 0.0050 (bf16-mixed) and 0.0100 (fp16-mixed) on average" in said
    assert "seeds are 0.2828 and 0.2828 apart" in said
    assert "the format matters less than the seed" in said
    far = {**losses, "fp16": [[2.0], [3.0]]}
    for kinds, which in ((("bert",), "the BERT a"), (("gpt", "bert"), "the GPT and the BERT a")):
        apart = {**data, "losses": {**data["losses"], **dict.fromkeys(kinds, far)}}
        assert which in replace(parity, data=apart).verdict("en")
    one = {k: {name: runs[:1] for name, runs in near.items()} for k in ("gpt", "bert")}
    assert "only several seeds" in replace(parity, data={**data, "losses": one}).verdict("en")


def test_parity_is_drawn_in_both_languages(parity, tmp_path, monkeypatch):
    assert_drawn(parity, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def low_bit():
    return made("low-bit", trained=40, draws=4)


def test_fewer_bits_are_further_off_and_stochastic_rounding_averages(low_bit):
    errors = low_bit.data["errors"]
    one = {name: each["one"] for name, each in errors.items()}
    assert one["bf16"] < one["mxfp8"] < one["nvfp4"] / 2
    assert one["bf16"] < one["fp8"] < one["nvfp4"] / 2
    assert one["kept"] < one["nvfp4"]
    for name, each in errors.items():
        if name in ("nvfp4", "kept"):
            assert each["mean"] < each["one"]
        else:  # to nearest: the same error each time
            assert each["mean"] == pytest.approx(each["one"], rel=1e-9)


def test_the_sentence_on_recipes_follows_the_numbers(low_bit):
    errors = {**low_bit.data["errors"], "nvfp4": {"one": 0.2, "mean": 0.18}}
    helped = {**low_bit.data, "errors": {**errors, "kept": {"one": 0.05, "mean": 0.05}}}
    assert "with block 0 in bf16 only 5.0% are left" in replace(low_bit, data=helped).verdict("en")
    not_so = {**helped, "errors": {**errors, "kept": {"one": 0.19, "mean": 0.05}}}
    not_so["blocks"] = [0.1, 0.3, 0.2]
    assert "block 1 is the one that makes the largest error" in replace(
        low_bit, data=not_so
    ).verdict("en")


def test_low_bit_is_drawn_in_both_languages(low_bit, tmp_path, monkeypatch):
    assert_drawn(low_bit, tmp_path, monkeypatch)


def test_bars_share_a_label_where_nothing_is_random(low_bit, tmp_path):
    path = tmp_path / "low-bit.svg"
    for draws, shared in ((4, 3), (1, 0)):  # bf16, fp8 and mxfp8; of one draw nothing can be said
        assert draw(replace(low_bit, data={**low_bit.data, "draws": draws}), path, "en")
        assert path.read_text().count("both times: always rounds to nearest<") == shared


@pytest.mark.slow
def test_at_full_size_the_seed_matters_more_and_the_first_block_is_the_sensitive_one():
    assert "the format matters less than the seed" in made("parity").verdict("en")
    whole = made("low-bit").data
    first, *others = whole["blocks"]
    assert first > 2 * max(others)
    assert whole["errors"]["kept"]["one"] < whole["errors"]["nvfp4"]["one"] / 2
    last = made("low-bit", kept_block=2, draws=1).data["errors"]
    assert last["kept"]["one"] > 0.7 * last["nvfp4"]["one"]
