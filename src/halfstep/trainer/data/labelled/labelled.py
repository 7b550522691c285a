"""Turns files of labelled texts into the training and the evaluation data of a classifier."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.corpus.documents import held_out
from halfstep.trainer.data.labelled.config import LabelledConfig, LabelledData, LabelledTexts
from halfstep.trainer.data.labelled.names import (
    is_integer,
    numbers_of,
    read_names,
    shown,
    sorted_names,
)
from halfstep.trainer.data.labelled.texts import NamedTexts, read_named
from halfstep.trainer.data.random_bits import permutation
from halfstep.words import Told

_told = Told("halfstep.trainer.data")


def read_labelled(config: LabelledConfig, seed: int) -> LabelledData:
    """Reads, checks and, without dev files, splits labelled texts.

    Texts and class numbers keep the order of the files. The seed, 0 <= seed < 2**64, decides the
    split and nothing else.

    Raises:
        ConfigError: There is no input, an optional library is missing, or a name is malformed.
        DataError: Something cannot be read or used; the message names the place and the remedy.
    """
    if not config.train:
        raise ConfigError(_told("no_labelled"))
    named = read_named(config.train, config, "train")
    listed = config.labels or (read_names(config.labels_file) if config.labels_file else ())
    where = config.labels_file or "data.labels"
    names = listed or sorted_names(set(named.labels))
    why = f"{where} lacks it; add it there, or correct the text's label"
    train, note = _known(named, names, "train", why)
    notes = [note, *_advice(named, config, listed)]
    present = set(train.labels)
    if absent := [name for number, name in enumerate(names) if number not in present]:
        raise DataError(
            f"{where}: no training text has the label {shown(absent)}, so that class would never "
            f"be learned; add texts or remove the name"
        )
    if len(names) < 2:
        raise DataError(
            f"data.train: every text has the label {names[0]!r}; a classifier needs at least two "
            f"classes: add texts of another, or check the column (--label-column)"
        )
    if config.dev:
        why = "no training text has it; add some, or correct the label"
        dev, note = read_known(config.dev, config, names, "dev", why)
        notes.append(note)
    else:
        keep, out = stratified_split(train.labels, config.dev_fraction, seed)
        notes.extend(
            f"class {names[label]!r} has a single text: it is trained on and not evaluated"
            for label, count in sorted(Counter(train.labels).items())
            if count == 1
        )
        train, dev = _take(train, keep), _take(train, out)
    notes.extend(_odd(names, train, dev, split=not config.dev))
    sha256 = _content_sha256(names, train, dev)
    return LabelledData(names, train, dev, sha256, tuple(note for note in notes if note))


def read_known(
    inputs: tuple[str, ...],
    config: LabelledConfig,
    names: tuple[str, ...],
    role: str,
    why: str = "the classifier has no such class",
) -> tuple[LabelledTexts, str]:
    """Reads labelled texts, ``inputs`` like ``config.train``, of classes that are known already.

    ``why`` is how the message about an unknown label goes on after the label.

    Returns:
        Texts and class numbers, and a note where texts were left out.
    """
    return _known(read_named(inputs, config, role), names, role, why)


def _known(
    named: NamedTexts, names: tuple[str, ...], role: str, why: str
) -> tuple[LabelledTexts, str]:
    numbers = numbers_of(named, names, why)
    note = f"{role}: {named.dropped} empty texts left out" if named.dropped else ""
    return LabelledTexts(named.texts, [numbers[label] for label in named.labels]), note


def _advice(named: NamedTexts, config: LabelledConfig, listed: Sequence[str]) -> list[str]:
    """Notes on options that data of this kind usually want."""
    notes = []
    if not listed and all(map(is_integer, named.first)):
        notes.append("the classes are numbers: --labels or --labels-file gives their names")
    if not config.join_words and 2 * named.segmented > len(named.texts):
        notes.append(
            f"{named.segmented} of {len(named.texts)} train texts have blanks between Chinese "
            f"words: --join-words removes them"
        )
    return notes


def _content_sha256(names: Sequence[str], train: LabelledTexts, dev: LabelledTexts) -> str:
    """Hashes names, texts and labels in order, each prefixed by its length to be unambiguous."""
    digest = hashlib.sha256()
    for strings, labels in ((names, []), (train.texts, train.labels), (dev.texts, dev.labels)):
        digest.update(len(strings).to_bytes(8, "little"))
        for string in strings:
            raw = string.encode("utf-8")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        digest.update(np.array(labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _take(part: LabelledTexts, places: npt.NDArray[np.int64]) -> LabelledTexts:
    chosen = places.tolist()
    return LabelledTexts([part.texts[i] for i in chosen], [part.labels[i] for i in chosen])


def _odd(
    names: tuple[str, ...], train: LabelledTexts, dev: LabelledTexts, *, split: bool
) -> list[str]:
    """Notes on labels that are allowed but may surprise."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.strip().casefold(), []).append(name)
    notes = [
        f"classes {shown(group)} differ only in case or blanks, and count as different"
        for group in alike.values()
        if len(group) > 1
    ]
    both = {*zip(train.texts, train.labels, strict=True), *zip(dev.texts, dev.labels, strict=True)}
    if conflicts := sum(labels > 1 for labels in Counter(text for text, _ in both).values()):
        notes.append(f"{conflicts} texts occur more than once, with different labels")
    seen = set(train.texts)
    repeated = sum(text in seen for text in dev.texts)
    if repeated:
        notes.append(
            f"{repeated} of {len(dev)} dev texts also stand in train, so scores on them are too "
            f"good"
        )
    if not split and (absent := sorted(set(range(len(names))) - set(dev.labels))):
        notes.append(f"dev has no text of {shown(names[label] for label in absent)}")
    return notes


def stratified_split(
    labels: Sequence[int], fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Holds out a share of the examples of every class; the seed decides which.

    Every class with two or more examples has at least one in each part; a class with one keeps it
    in train. Within these bounds the sizes are those of ``dev_sizes``.

    Returns:
        (train, dev): places in ``labels``, ascending; together every place once.
    """
    found = np.asarray(labels, dtype=np.int64)
    counts: npt.NDArray[np.int64] = np.bincount(found).astype(np.int64)
    if counts.max(initial=0) < 2:
        raise DataError(
            "data.train: no class has two texts, so none can be held out for evaluation; add "
            "texts or give data.dev"
        )
    sizes = np.array(dev_sizes(counts.tolist(), held_out(len(found), fraction)))
    # Examples in random order, then by class: an example's rank within its class decides.
    order = permutation("held out", seed, 0, len(found))
    order = order[np.argsort(found[order], kind="stable")]
    first = np.cumsum(counts) - counts
    rank = np.arange(len(found)) - np.repeat(first, counts)
    is_dev = np.zeros(len(found), dtype=np.bool_)
    is_dev[order] = rank < np.repeat(sizes, counts)
    return np.flatnonzero(~is_dev), np.flatnonzero(is_dev)


def dev_sizes(counts: Sequence[int], total: int) -> list[int]:
    """Divides ``total`` held-out examples among classes by the largest remainder, within bounds.

    A class of n examples gets at least 1 and at most n - 1 (a class of one gets 0). The shares add
    up to ``total`` as far as these bounds allow; among equal remainders, earlier classes win.

    **Source:** the method of largest remainders (Hamilton's apportionment).
    """
    examples = sum(counts)
    low = [1 if count >= 2 else 0 for count in counts]
    high = [max(count - 1, 0) for count in counts]
    # Integer arithmetic throughout, to be exact: a class's quota is count * total / examples.
    sizes = [
        min(max(count * total // examples, least), most)
        for count, least, most in zip(counts, low, high, strict=True)
    ]
    while (wanted := total - sum(sizes)) != 0:
        up = wanted > 0
        open_classes = [
            c for c in range(len(counts)) if (sizes[c] < high[c] if up else sizes[c] > low[c])
        ]
        if not open_classes:
            return sizes
        sign = 1 if up else -1
        neediest = sorted(
            open_classes, key=lambda c: sign * (sizes[c] * examples - counts[c] * total)
        )
        for c in neediest[: abs(wanted)]:
            sizes[c] += sign
    return sizes
