"""Text in columns."""

from halfstep.shown import aligned


def test_columns_are_aligned():
    assert aligned([("a", "long", "c"), ("bb", "x", "")], {1}) == "a   long  c\nbb     x"
