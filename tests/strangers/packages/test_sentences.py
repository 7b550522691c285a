"""sentence-transformers under every policy."""

import pytest

from strangers.packages.cells import check
from strangers.packages.sentences import PROGRAMS

pytestmark = pytest.mark.strangers


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_policy_trains_it_or_refuses_it(program, record_property):
    check(program, record_property)
