"""Draws random 64-bit numbers as a pure function of a seed and of their purpose."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from halfstep.errors import ConfigError


def philox_bits(purpose: str, seed: int, number: int, count: int) -> npt.NDArray[np.uint64]:
    """Draws the first ``count`` numbers of the stream (purpose, seed, number).

    The key of Philox is a hash, so that neighbouring seeds and numbers have nothing in common. The
    bits of Philox are the same on every platform and in every version of NumPy (what a
    ``Generator`` makes of them is not promised).

    Args:
        purpose: What the numbers are for, so that two uses of one seed get different streams.
        seed: 0 <= seed < 2**64.
        number: Epoch or step, 0 <= number < 2**64.
        count: How many, at least 0; a longer stream begins with the shorter one.

    **Source:** Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); NEP 19.
    """
    for name, value in (("seed", seed), ("epoch or step", number)):
        if not 0 <= value < 1 << 64:
            raise ConfigError(f"{name} must be at least 0 and below 2**64, got {value}")
    digest = hashlib.sha256(f"halfstep:{purpose}:{seed}:{number}".encode()).digest()
    words = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    key = np.array(words, dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count).astype(np.uint64, copy=False)


def permutation(purpose: str, seed: int, number: int, count: int) -> npt.NDArray[np.int64]:
    """Shuffles 0 to count - 1 by sorting random numbers; arguments as in ``random_bits``.

    Two of ``count`` numbers are equal with probability below count**2 / 2**65; those two keep
    their order.
    """
    bits = philox_bits(purpose, seed, number, count)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
