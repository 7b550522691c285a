"""Files of labelled texts become the training and the evaluation data of a classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfstep.data.label_names import check_known, class_names, look_alikes, shown
from halfstep.data.labelled_config import LabelledConfig, LabelledData, LabelledTexts
from halfstep.data.labelled_files import NamedTexts, read_named
from halfstep.data.labelled_split import single_examples, stratified_split
from halfstep.errors import ConfigError


def read_labelled(config: LabelledConfig, seed: int) -> LabelledData:
    """Reads, checks and, without dev files, splits labelled texts.

    Args:
        config: What to read.
        seed: Decides the split, and nothing else; 0 <= seed < 2**64.

    Returns:
        Texts and class numbers, in the order of the files, with notes on what looks odd.

    Raises:
        ConfigError: There is no input, an optional library is missing, or a name is malformed.
        DataError: Something cannot be read or used; the message names the place and the remedy.
    """
    if not config.train:
        raise ConfigError("data.train is empty; name a file with texts and labels by --train")
    named = read_named(config.train, config, "train")
    names = class_names(config, named)
    notes = [_dropped("train", named)]
    train = _numbered(named, names)
    if config.dev:
        why = "no training text has it; add some, or correct the label"
        dev, note = read_known(config.dev, config, names, "dev", why)
        notes.append(note)
    else:
        keep, out = stratified_split(train.labels, config.dev_fraction, seed)
        notes.extend(
            f"class {names[label]!r} has a single text: it is trained on and not evaluated"
            for label in single_examples(train.labels)
        )
        train, dev = _take(train, keep), _take(train, out)
    notes.extend(_odd(names, train, dev, split=not config.dev))
    sha256 = content_sha256(names, train, dev)
    return LabelledData(names, train, dev, sha256, tuple(note for note in notes if note))


def read_known(
    inputs: tuple[str, ...],
    config: LabelledConfig,
    names: tuple[str, ...],
    role: str,
    why: str = "the classifier has no such class",
) -> tuple[LabelledTexts, str]:
    """Reads labelled texts of classes that are known already.

    Args:
        inputs: As ``config.train``.
        config: Columns, and what to do with empty texts.
        names: The classes, in the order of their numbers.
        role: ``dev`` or ``test``.
        why: How the message about an unknown label goes on after the label.

    Returns:
        Texts and class numbers, and a note where texts were left out.

    Raises:
        ConfigError: As ``read_labelled``.
        DataError: As ``read_labelled``; a label is not among ``names``.
    """
    named = read_named(inputs, config, role)
    check_known(named, names, why)
    return _numbered(named, names), _dropped(role, named)


def content_sha256(names: Sequence[str], train: LabelledTexts, dev: LabelledTexts) -> str:
    """Hashes names, texts and labels in order, every part with its length before it.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    _hash_strings(digest, names)
    for part in (train, dev):
        _hash_strings(digest, part.texts)
        digest.update(np.array(part.labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _hash_strings(digest: hashlib._Hash, strings: Sequence[str]) -> None:
    digest.update(len(strings).to_bytes(8, "little"))
    for string in strings:
        raw = string.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little") + raw)


def _numbered(named: NamedTexts, names: Sequence[str]) -> LabelledTexts:
    numbers = {name: number for number, name in enumerate(names)}
    return LabelledTexts(named.texts, [numbers[label] for label in named.labels])


def _take(part: LabelledTexts, places: npt.NDArray[np.int64]) -> LabelledTexts:
    chosen = places.tolist()
    return LabelledTexts([part.texts[i] for i in chosen], [part.labels[i] for i in chosen])


def _dropped(role: str, named: NamedTexts) -> str:
    return f"{role}: {named.dropped} empty texts left out" if named.dropped else ""


def _odd(
    names: tuple[str, ...], train: LabelledTexts, dev: LabelledTexts, *, split: bool
) -> list[str]:
    """Words what is no error but may surprise."""
    notes = [
        f"classes {shown(group)} differ only in case or blanks, and count as different"
        for group in look_alikes(names)
    ]
    first: dict[str, int] = {}
    conflicts = _conflicts(train, first)
    repeated = sum(text in first for text in dev.texts)
    conflicts |= _conflicts(dev, first)
    if conflicts:
        notes.append(f"{len(conflicts)} texts occur more than once, with different labels")
    if repeated:
        notes.append(
            f"{repeated} of {len(dev)} dev texts also stand in train, so scores on them are too "
            f"good"
        )
    if not split and (absent := sorted(set(range(len(names))) - set(dev.labels))):
        notes.append(f"dev has no text of {shown(names[label] for label in absent)}")
    return notes


def _conflicts(part: LabelledTexts, first: dict[str, int]) -> set[str]:
    """Finds the texts whose label differs from the first one they were seen with; fills first."""
    return {
        text
        for text, label in zip(part.texts, part.labels, strict=True)
        if first.setdefault(text, label) != label
    }
