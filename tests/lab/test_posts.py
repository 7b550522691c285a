"""The posts and the BERT that experiments on an encoder share."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from halfstep.errors import DataError
from halfstep.lab import material, posts
from halfstep.optim import AdamW


def texts_of(batch) -> list[tuple[int, ...]]:
    return [tuple(row[row != posts.PADDING].tolist()) for row in batch[0]]


def test_the_sample_is_split_and_every_class_is_there():
    source = posts.posts()
    train, held_out = texts_of(source.train), texts_of(source.held_out)
    assert len(train) > 2500
    assert len(held_out) == 200
    assert not set(train) & set(held_out)  # the sample's posts are all different
    assert len(source.classes) == len(set(source.train[1].tolist())) == 6
    assert {row[0] for row in train} == {posts.CLS}
    assert max(max(row) for row in train) == source.characters - 1


def write(path, count):
    rows = [{"text": f"{'up' if i % 2 else 'down'} {i}", "label": i % 2} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_labelled_file_is_read_and_one_that_is_too_small_refused(tmp_path):
    source = posts.posts(write(tmp_path / "posts.jsonl", 100))
    assert source.classes == ("0", "1")
    assert (len(source.train[0]), len(source.held_out[0])) == (90, 10)
    (tmp_path / "moods.csv").write_text("text,mood\nhello,x\n")
    with pytest.raises(DataError, match=r"'mood'\); call the column 'label'$"):
        posts.posts(str(tmp_path / "moods.csv"))  # the command has no --label-column
    # [CLS] and the characters of the longest text, such as "down 98"
    assert posts._cut(source.train[0]).shape[1] == 1 + len("down 98")
    with pytest.raises(DataError, match="39 texts; the experiment needs at least 40"):
        posts.posts(write(tmp_path / "few.jsonl", 39))


def test_posts_of_one_class_are_refused(tmp_path):
    """With one class no format makes a difference, nor a seed: a verdict would be about nothing."""
    path = tmp_path / "one.csv"
    path.write_text("text,label\n" + "".join(f"word {i},happy\n" for i in range(50)))
    with pytest.raises(
        DataError, match=r"one\.csv: every label is 'happy'; .* at least two classes"
    ):
        posts.posts(str(path))


def test_batches_follow_from_their_seed():
    source = posts.posts()
    first, second = islice(posts.batches(source, 4, seed=0), 2)
    again, other = next(posts.batches(source, 4, 0)), next(posts.batches(source, 4, 1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert texts_of(first) != texts_of(second)
    assert texts_of(first) != texts_of(other)
    known = dict(zip(texts_of(source.train), source.train[1].tolist(), strict=True))
    assert [known[text] for text in texts_of(first)] == first[1].tolist()


def test_padding_and_other_posts_do_not_change_a_post():
    source = posts.posts()
    model = posts.Bert(source)
    ids = source.train[0][:8]
    with torch.no_grad():
        together = model(ids)
        alone = torch.cat([model(row[row != posts.PADDING][None]) for row in ids])
        moved = model(ids[:, torch.tensor([0, 2, 1, *range(3, ids.shape[1])])])
    torch.testing.assert_close(together, alone)
    assert not torch.allclose(together, moved, atol=1e-7), "it has no positions"


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_it_learns_the_sample(policy):
    source = posts.posts()
    model = posts.Bert(source, seed=1)
    optimizer, looks = AdamW(model.parameters(), lr=2e-3), []

    def look(step, precision):
        if step in (1, 60):
            looks.append(posts.held_out(precision, model, source))

    results = material.train(policy, model, optimizer, posts.batches(source, 32, 1), 60, after=look)
    assert all(result.applied for result in results)
    (before, _), (after, accuracy) = looks
    assert after < before - 0.5
    assert accuracy > 0.5
