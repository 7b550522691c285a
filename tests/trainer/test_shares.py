"""What of a step a rank and a micro-batch take, and the seed that its dropout gets."""

import hashlib
from types import SimpleNamespace

from hypothesis import given, strategies as st

from halfstep.distributed.layout import Layout
from halfstep.trainer.session import open_session
from halfstep.trainer.tasks.task import dropout_seed, share_of
from trainer.runs import small_config


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


def test_tensor_ranks_drop_the_same_units_and_ranks_with_other_rows_others(corpus):
    session, layout, seeds = open_session(small_config(corpus)), Layout(data=2, tensor=2), []
    for rank in range(4):
        session.strategy = SimpleNamespace(layout=layout, batch_rank=layout.batch_rank(rank))
        seeds += session.micro_batches(0).seeds
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
