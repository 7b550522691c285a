"""What of a step a rank and a micro-batch take, and the seed that its dropout gets."""

import hashlib

from hypothesis import given, strategies as st

from halfstep.trainer.tasks.task import dropout_seed, share_of


@given(st.integers(0, 200), st.integers(1, 20))
def test_shares_follow_each_other_and_differ_by_one_at_most(size, ranks):
    shares = [share_of(size, rank, ranks) for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_dropout_of_today_is_the_dropout_for_ever():
    # a run that goes on under a later version draws what it would have drawn
    digest = hashlib.sha256(b"dropout 7 100 16").hexdigest()
    little = int("".join(reversed([digest[i : i + 2] for i in range(0, 16, 2)])), 16)
    assert dropout_seed(7, 100, 16) == little // 2
