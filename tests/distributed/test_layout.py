"""Layouts by name: what is read, what is refused, and where each rank stands."""

from __future__ import annotations

import math

import pytest

from every import every
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError

TEXTS = {
    "": (1, 1, 1),
    "data=1": (1, 1, 1),
    "data=4": (4, 1, 1),
    "tensor=2,data=3": (3, 1, 2),
    "data = 2 , shard = 2": (2, 2, 1),
    "shard=8": (1, 8, 1),
    "data=2,shard=1,tensor=2": (2, 1, 2),
}


def test_texts():
    def check(text, sizes):
        layout = Layout.parse(text)
        assert (layout.data, layout.shard, layout.tensor) == sizes
        assert layout.size == math.prod(sizes)
        assert layout.batch_ranks == sizes[0] * sizes[1]

    every(TEXTS.items(), check)


def test_other_texts_are_refused_and_shown():
    def check(text):
        with pytest.raises(ConfigError) as error:
            Layout.parse(text)
        assert repr(text) in str(error.value)
        assert "allowed: each of data, shard, tensor once" in str(error.value)

    every(["data", "data=", "data=0", "data=-2", "data=two", "data=2.0", "data=1e1", "=2", "2",
           "pipe=2", "Data=2", "data=2,data=2", "data=2;tensor=2", "data=2 tensor=2", "data==2",
           "data=2=2", "size=2", "data=+2", "axes=1"], check)  # fmt: skip


def test_no_text_is_data_over_all_ranks():
    assert Layout.choose("", 6) == Layout(data=6)
    assert Layout.choose("", 1) == Layout()
    assert Layout.choose("data=2,tensor=3", 6) == Layout(data=2, tensor=3)


def test_another_number_of_ranks_is_refused_with_both_numbers():
    for text, ranks in (("data=2", 1), ("data=2,tensor=2", 2), ("data=1", 2)):
        needed = Layout.parse(text).size
        told = f"needs {needed} ranks, the run has {ranks}.*--nproc"
        with pytest.raises(ConfigError, match=told):
            Layout.choose(text, ranks)
