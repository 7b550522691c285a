import itertools

import pytest
from hypothesis import given, strategies as st

from halfstep.trainer.data.corpus.documents import character_start, split_pieces

TEXT = st.text(
    alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\r\t"))
)


def chunked(data, cuts):
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(TEXT, st.integers(4, 40), st.lists(st.integers(0, 60)))
def test_pieces_join_to_the_text_and_each_is_whole_and_small(text, size, cuts):
    data = text.encode()
    pieces = list(split_pieces(chunked(data, cuts), size))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= size for piece in pieces)
    for piece in pieces:
        piece.decode("utf-8")  # raises when a character is cut


@given(TEXT, st.integers(4, 40), st.lists(st.integers(0, 60)))
def test_where_cuts_fall_does_not_depend_on_the_chunks(text, size, cuts):
    data = text.encode()
    assert list(split_pieces(chunked(data, cuts), size)) == list(split_pieces([data], size))


@given(st.binary(max_size=100), st.integers(4, 20))
def test_bytes_that_are_no_text_come_through_unharmed(data, size):
    pieces = list(split_pieces([data], size))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= size for piece in pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("one\ntwo three\nfour", ["one\n", "two three\n", "four"]),  # after a newline
        ("one two three four", ["one two", " three", " four"]),  # before a blank
        ("one\ttwo three", ["one\ttwo", " three"]),
        ("abcdefghijklmnop", ["abcdefghij", "klmnop"]),  # anywhere
        ("ééééééé", ["ééééé", "éé"]),
        ("aéééééé", ["aéééé", "éé"]),  # not within a character
        ("line\r\nline\r\n", ["line\r\n", "line\r\n"]),
    ],
)
def test_cuts_prefer_newlines_then_blanks_then_characters(text, pieces):
    found = [piece.decode() for piece in split_pieces([text.encode()], 10)]
    assert found == pieces


def test_a_piece_must_be_able_to_hold_a_character():
    with pytest.raises(ValueError, match="at least 4"):
        list(split_pieces([b"text"], 3))


@given(st.characters(exclude_categories=["Cs"]), st.text(max_size=3))
def test_character_start_finds_the_first_byte(character, before):
    start = len(before.encode())
    data = (before + character).encode()
    assert {character_start(data, i) for i in range(start, len(data))} == {start}
