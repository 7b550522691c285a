"""Memory that 16 bits do not halve, bytes that they do, and speed that depends on the width."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count

import pytest

from halfstep.errors import ConfigError, PrecisionError
from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiments.costs import speed as speed_experiment
from halfstep.lab.figure import draw
from lab.drawn import assert_drawn, made

WIDTH, VOCABULARY, SEQUENCES, LENGTH, LAYERS = 32, 500, 4, 64, 4
PARAMETERS = (VOCABULARY + LENGTH + 2) * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH)


@pytest.fixture(scope="module")
def memory():
    return made("memory", width=WIDTH, vocabulary=VOCABULARY, sequences=SEQUENCES)


def size(found, policy, part):
    return sum(found.data["bytes"][policy][part].values())


def total(found, policy):
    return sum(size(found, policy, part) for part in found.data["bytes"][policy])


def test_mixed_precision_keeps_its_state_in_fp32_and_adds_copies(memory):
    for part, each in {"weights": 4, "gradients": 4, "moments": 8}.items():
        for policy in ("fp32", "bf16-mixed"):
            assert memory.data["bytes"][policy][part] == {"fp32": each * PARAMETERS}
    # Linear layers' weights, the positions' and norms' stay out; the head's table is one of them.
    assert 1.5 * PARAMETERS < size(memory, "bf16-mixed", "cast copies") < 2 * PARAMETERS
    assert size(memory, "fp32", "cast copies") == 0


def test_only_activations_shrink_and_so_the_step_is_not_halved(memory):
    logits = 4 * SEQUENCES * LENGTH * VOCABULARY
    assert memory.data["bytes"]["bf16-mixed"]["logits"]["fp32"] == logits
    smaller = size(memory, "bf16-mixed", "activations") / size(memory, "fp32", "activations")
    assert 0.5 < smaller < 0.7
    assert total(memory, "bf16-mixed") > 0.6 * total(memory, "fp32")
    least = total(memory, "bf16-split,moments=8bit")
    assert least < total(memory, "bf16-split") < total(memory, "bf16-mixed")


def test_with_one_sequence_mixed_precision_holds_more():
    one = made("memory", sequences=1, width=128, vocabulary=VOCABULARY)
    assert total(one, "bf16-mixed") > total(one, "fp32")
    assert one.verdict("en").startswith("Here bf16-mixed holds more than fp32")


def test_the_sentence_on_memory_names_the_part_in_fp32(memory):
    parts = memory.data["bytes"]["bf16-mixed"]
    wide = sum(forms.get("fp32", 0) for forms in parts.values()) / total(memory, "bf16-mixed")
    assert f"{wide:.0%} of it is still fp32" in memory.verdict("en")


def test_memory_is_drawn_in_both_languages(memory, tmp_path, monkeypatch):
    assert_drawn(memory, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def sent():
    return made("communication", width=32)


def test_bytes_are_halved_and_the_error_is_that_of_two_roundings(sent):
    parameters = sent.data["parameters"]
    # 2 (n - 1) / n of the gradients for n = 2, and padding of at most a few elements a bucket
    assert parameters * 4 <= sent.data["sent"]["fp32"] <= parameters * 4 * 1.01
    assert sent.data["sent"]["bf16"] * 2 == pytest.approx(sent.data["sent"]["fp32"], rel=0.01)
    assert sent.data["error"]["fp32"] == 0.0
    # Each rank's gradient and their sum are rounded once, by at most half a gap of 2^-8
    assert 2**-11 < sent.data["error"]["bf16"] < 2 * 2**-9 * 1.5
    assert sent.data["error"]["fp16"] < sent.data["error"]["bf16"]
    assert sent.data["error"]["bf16"] < 0.1 * sent.data["noise"]


def test_the_sentence_on_bytes_follows_the_numbers(sent):
    assert "which is no small part" not in sent.verdict("en")
    noisy = {**sent.data, "noise": 5 * sent.data["error"]["bf16"]}
    assert "which is no small part" in replace(sent, data=noisy).verdict("en")


def test_communication_is_drawn_in_both_languages(sent, tmp_path, monkeypatch):
    assert_drawn(sent, tmp_path, monkeypatch)


def test_a_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"ranks=1; allowed: integers from 2 to 8"):
        EXPERIMENTS["communication"].options_of({"ranks": "1"})


@pytest.fixture(scope="module")
def speed():
    """Real but few steps: what is asserted is the sentence, not the speed."""
    return made("speed", rounds=1, width=32)


@pytest.mark.parametrize(
    ("ratios", "instructions", "sentence"),
    [
        ((0.7, 0.9, 1.2, 1.9), True, "pays from width 256 on: it is 0.70 times"),
        ((1.1, 1.2, 1.5, 1.9), True, "pays at every width"),
        ((1.1, 0.8, 0.9, 1.3), True, "pays at some of the widths, but not from one"),
        ((0.8, 1.2, 0.9, 1.0), True, "0.80 times .* 1.20 times at best and 1.00 times"),
        ((0.7, 0.8, 0.9, 1.0), True, "does not pay at any width .* at best it is 1.00"),
        ((0.7, 0.8, 0.9, 1.0), False, "has no instructions for bf16, and bf16-mixed does not pay"),
    ],
)  # fmt: skip
def test_the_sentence_on_speed_follows_the_numbers(speed, ratios, instructions, sentence):
    rows = [{**row, "ratio": r} for row, r in zip(speed.data["widths"], ratios, strict=True)]
    data = {**speed.data, "widths": rows, "instructions": instructions}
    assert re.search(sentence, replace(speed, data=data).verdict("en"))


def test_speed_is_a_ratio_of_steps_at_four_widths_and_five_batches(speed):
    assert [row["at"] for row in speed.data["widths"]] == [64, 128, 256, 512]
    assert [row["at"] for row in speed.data["sequences"]] == [1, 2, 4, 8, 16]
    for row in (*speed.data["widths"], *speed.data["sequences"]):
        assert 0 < row["low"] <= row["ratio"] <= row["high"]


def test_the_ratio_is_that_of_the_times(monkeypatch):
    """By a clock in whose time a step of fp32 takes 3 s, and one of the policy 2 s."""
    ticks = (sum((0, 3, 0, 2)[: number % 4 + 1]) + 5 * (number // 4) for number in count())
    monkeypatch.setattr(speed_experiment.time, "perf_counter", lambda: next(ticks))
    found = speed_experiment._pairs("bf16-mixed", 32, 1, 3)
    assert found == {"ratio": 1.5, "low": 1.5, "high": 1.5}


def test_speed_is_drawn_in_both_languages(speed, tmp_path, monkeypatch):
    assert_drawn(speed, tmp_path, monkeypatch)


def test_the_figure_of_speed_names_its_machine_and_what_was_measured_twice(speed, tmp_path):
    known = {**speed.data, "processor": "A Chip 9", "threads": 3, "rounds": 5, "width": 256}
    path = tmp_path / "speed.svg"
    for instructions, said in ((True, "has bf16"), (False, "has no bf16")):
        assert draw(replace(speed, data={**known, "instructions": instructions}), path, "en")
        svg = path.read_text()
        assert ">Measured on: A Chip 9<" in svg
        assert f">({said} instructions; threads: 3)<" in svg
        assert ">dots: median; bars: quartiles (rounds: 5)<" in svg
        assert ">ringed: one setting, measured twice" in svg
    assert draw(replace(speed, data={**known, "width": 32}), path, "en")
    assert "ringed" not in path.read_text()


def test_a_policy_that_cannot_be_compared_is_refused():
    with pytest.raises(ConfigError, match="fp32 is what it is compared with"):
        made("speed", policy="fp32")
    with pytest.raises(PrecisionError):
        made("speed", policy="fp9")


@pytest.mark.slow
def test_at_full_size_memory_is_not_halved_and_three_ranks_send_a_third_more():
    whole = made("memory")
    assert total(whole, "bf16-mixed") > 0.7 * total(whole, "fp32")
    logits = made("memory", vocabulary=16000).data["bytes"]["bf16-mixed"]
    sizes = {part: sum(forms.values()) for part, forms in logits.items()}
    assert max(sizes, key=sizes.__getitem__) == "logits"
    two, three = (made("communication", ranks=n).data["sent"]["bf16"] for n in (2, 3))
    assert three / two == pytest.approx(4 / 3, rel=0.01)
    four = made("communication", micro_batches=4).data["sent"]["bf16"]
    assert four == two
