"""``halfstep train`` on ranks of the pool: the command is called on each, in the pool's processes.

What launchers add to it stands in tests/cli/test_train_ranks.py.
"""

from __future__ import annotations

import pytest
from tests.cli.ranks import (
    alone,
    assert_near_state,
    assert_one_line,
    assert_same_state,
    cut_to,
    losses,
    numbers,
    tiny,
)

from distributed.commands import on_ranks

pytestmark = pytest.mark.distributed


def run(pool, *words):
    return on_ranks(pool, "train", *words)


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """Folders of runs of one process, each made once."""
    made = {}

    def run_alone(*more, **shape):
        key = (*more, *shape.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("one") / "r"
            with pytest.MonkeyPatch.context() as patch:
                alone([*tiny(corpus, made[key], **shape), *more], patch)
        return made[key]

    return run_alone


def assert_near(path, one):
    assert losses(path) == pytest.approx(losses(one), rel=1e-5)
    assert_near_state(path, one)


UNCLIPPED = ("--optimizer.max_norm", "0")  # shards add its norm in another order


@pytest.mark.parametrize(
    ("precision", "parallel", "more"),
    [
        ("fp32", "data=2", ()),
        ("bf16-mixed", "shard=2", UNCLIPPED),
    ],
)
def test_two_ranks_are_two_micro_batches_bit_for_bit_and_rank_0_prints(
    pool2, corpus, tmp_path, reference, precision, parallel, more
):
    path = tmp_path / "r"
    words = [*tiny(corpus, path, precision=precision), "--parallel", parallel, *more]
    (code, out, err), silent = run(pool2, *words)
    assert code == 0, err
    assert silent == (0, "", "")
    assert len(out.splitlines()) == 2  # the summary and the verdict
    assert f"2 ranks as {parallel}" in err
    one = reference("--grad-accum", "2", *more, precision=precision)
    assert losses(path) == losses(one)
    assert_same_state(path, one)


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        ("shard=2", ()),
        ("tensor=2", ("--model.activation_checkpointing", "true")),
        ("data=2", ("--batch-size", "5")),  # which ranks cannot share equally
        *(
            pytest.param(x, (), marks=pytest.mark.slow)
            for x in ("data=2,tensor=2", "data=2,shard=2", "shard=2,tensor=2")
        ),
    ],
)
def test_ranks_are_one_process(request, corpus, tmp_path, reference, parallel, more):
    pool = request.getfixturevalue("pool4" if "," in parallel else "pool2")
    path = tmp_path / "r"
    (code, _, err), *_ = run(pool, *tiny(corpus, path), "--parallel", parallel, *more)
    assert code == 0, err
    assert_near(path, reference(*more))


@pytest.mark.parametrize(
    ("size", "layouts"),
    [(2, ("shard=2", "tensor=2", "")), (4, ("shard=2,tensor=2", "", "data=2,tensor=2"))],
)
def test_a_run_goes_through_all_layouts(
    request, size, layouts, corpus, tmp_path, reference, monkeypatch
):
    path, pool = tmp_path / "r", request.getfixturevalue(f"pool{size}")
    assert run(pool, *tiny(corpus, path, steps=16), "--quiet")[0][0] == 0
    for step, layout in zip((4, 8, 12), layouts, strict=True):
        before, path = path, tmp_path / f"{layout}-{step}"
        cut_to(before, path, step)
        again = ["--resume", "--output-dir", path, "--parallel", layout]
        if layout:
            assert {code for code, _, _ in run(pool, *again, "--quiet")} == {0}
        else:
            alone(again, monkeypatch)
        assert_near(path, reference(steps=16))


@pytest.mark.parametrize(("size", "layout"), [(2, "tensor=2"), (4, "shard=2,tensor=2")])
def test_the_same_layout_goes_on_bit_for_bit(request, size, layout, corpus, tmp_path):
    """Of tensor parallel ranks; of sharded ones: test_trainer_ranks.py."""
    pool = request.getfixturevalue(f"pool{size}")
    whole, again = tmp_path / "whole", tmp_path / "cut"
    words = tiny(corpus, whole, steps=8)
    more = ["--parallel", layout, "--model.dropout", "0.1", "--quiet"]
    assert run(pool, *words, *more)[0][0] == 0
    cut_to(whole, again, 4)
    (code, _, err), *_ = run(pool, "--resume", "--output-dir", again, "--quiet")
    assert (code, err) == (0, "")
    assert numbers(again) == numbers(whole)
    assert_same_state(again, whole)


def test_a_folder_that_cannot_be_made_ends_all_ranks(pool2, corpus, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (cause, _, said), (follows, _, other) = run(pool2, *tiny(corpus, file / "r"), "--quiet")
    assert (cause, follows) == (2, 1)
    assert_one_line(said, f"{file / 'r'}: Not a directory")
    assert_one_line(other, "rank 0: NotADirectoryError: ")


def test_a_guard_stops_all_ranks_with_the_same_message(pool2, corpus, tmp_path):
    words = [*tiny(corpus, tmp_path / "r", save=1), "--learning-rate", "1e30", "--quiet"]
    ends = run(pool2, *words, "--schedule.warmup_steps", 0)
    assert [(code, out) for code, out, _ in ends] == [(3, "")] * 2
    for _, _, err in ends:
        assert_one_line(err, "step 2: the loss is ", "the last checkpoint is ", "step-00000001")
    assert ends[0][2].replace("rank 0:", "rank 1:", 1) == ends[1][2]
