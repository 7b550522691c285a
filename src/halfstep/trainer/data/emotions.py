"""Makes sample posts with an emotion for fine-tuning.

They are synthetic: they come from the grammar in ``emotions.toml``, so a classifier learns them
almost without a mistake.
"""

from __future__ import annotations

import random
import tomllib
from importlib import resources
from itertools import product
from typing import Any, NamedTuple

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.texts import join_words


class Post(NamedTuple):
    """A text, cut into words by blanks, and the name of its emotion."""

    words: str
    label: str

    @property
    def text(self) -> str:
        """The post as people write it."""
        return join_words(self.words)


def emotions(count: int, seed: int = 0) -> tuple[tuple[str, ...], list[Post]]:
    """Makes posts with one of six emotions, all different, from a grammar of templates.

    Returns:
        The emotions in the order of their ids, and the posts in random order.

    Raises:
        DataError: If the grammar has fewer posts.
    """
    text = resources.files(__package__).joinpath("emotions.toml").read_text(encoding="utf-8")
    grammar = tomllib.loads(text)
    drawn, shares = random.Random(seed), grammar["shares"]
    names, total = tuple(grammar["phrases"]), sum(shares.values())
    posts = []
    for number, name in enumerate(names):
        every = _posts(grammar, name)
        before = sum(shares[other] for other in names[:number])
        wanted = count * (before + shares[name]) // total - count * before // total
        if wanted > len(every):
            most = len(every) * total // shares[name]
            raise DataError(f"the grammar cannot make {count} posts; ask for at most {most}")
        posts += [Post(words, name) for words in drawn.sample(every, wanted)]
    drawn.shuffle(posts)
    return names, posts


def _posts(grammar: dict[str, Any], name: str) -> list[str]:
    """Lists all posts of one emotion, each once."""
    parts = grammar["openings"], grammar["topics"], grammar["phrases"][name], grammar["endings"]
    every = (" ".join(part for part in one if part) for one in product(*parts))
    return list(dict.fromkeys(every))
