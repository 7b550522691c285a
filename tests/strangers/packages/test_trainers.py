"""The Trainer of transformers under every policy that it can be asked for."""

import pytest

from strangers.packages.cells import check
from strangers.packages.trainers import PROGRAMS

pytestmark = pytest.mark.strangers


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_policy_trains_it_or_refuses_it(program, record_property):
    check(program, record_property)
