"""A tensor in a few numbers: how far two tensors are apart, and whether their bits are equal.

A sketch sums blocks of neighbouring elements with fixed random signs. It is linear, so that parts
of a batch, or of a sharded weight, are put together after they were recorded; and the squared
distance of two sketches has the squared distance of the tensors as its mean.

Source: Alon, Matias, Szegedy, The space complexity of approximating the frequency moments (1996).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

K = 128
"""Numbers of a sketch at most, of all samples together."""
_BLOCKS = 32  # of one sample, before they are folded
# From here on it is the filling of a mask, which is another in other formats.
_HUGE, _HUGE_FP16 = 1e9, 6.5e4


def random_words(n: int) -> np.ndarray:
    """N fixed random uint64: splitmix64 of the numbers from 1, the same on each machine."""
    with np.errstate(over="ignore"):
        x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words: np.ndarray = x ^ (x >> np.uint64(31))
    return words


_SIGNS = (random_words(K) & np.uint64(1)).astype(np.float32) * 2 - 1


@cache
def _first(n: int, device: torch.device, *, signs: bool = True) -> Tensor:
    words = random_words(n)
    values = (words & np.uint64(1)).astype(np.float32) * 2 - 1 if signs else words.view(np.int64)
    return torch.from_numpy(values).to(device)


def block_sums(values: Tensor, groups: int, most: int = _BLOCKS) -> Tensor:
    """Sum blocks of each of ``groups`` equal parts of a real tensor with signs: fp32 [n]."""
    flat = values.reshape(groups, -1)
    huge = _HUGE_FP16 if values.dtype is torch.float16 else _HUGE
    flat = flat if flat.dtype is torch.float32 else flat.float()
    size = flat.shape[1]
    blocks = min(most, 1 << (size - 1).bit_length())
    length = -(-size // blocks)
    if size % blocks:
        flat = F.pad(flat, (0, blocks * length - size))
    signs = _first(length, flat.device)
    sums = torch.mv(flat.view(-1, length), signs)
    if flat.device.type != "cpu" or not torch.linalg.vector_norm(sums, math.inf).item() < huge:
        flat = torch.where(flat.abs() < huge, flat, flat.sign().nan_to_num())
        sums = torch.mv(flat.view(-1, length), signs)
    return sums


def sketch_of(sums: np.ndarray, groups: int) -> np.ndarray:
    """Make the sketch [groups, n] of block sums: at most ``K`` numbers where groups are fewer."""
    blocks = len(sums) // groups
    kept = min(blocks, 1 << (max(1, K // groups).bit_length() - 1))
    return fold(sums.reshape(groups, blocks) * _SIGNS[:blocks], kept)


def bit_sum(values: Tensor) -> Tensor:
    """Sum a tensor's memory as integers that wrap: equal bits in any order give an equal sum."""
    flat = values.contiguous().as_strided((values.numel(),), (1,))  # one element has any stride
    whole = flat.element_size() * flat.numel() % 8 == 0
    whole &= flat.element_size() * flat.storage_offset() % 8 == 0
    size = 8 if whole else flat.element_size()
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return flat.view(dtype).sum(dtype=torch.int64)


def sample_hashes(values: Tensor, groups: int) -> Tensor:
    """Hash each of ``groups`` equal parts of a tensor, place by place: int64 [groups].

    Floating values are hashed as bf16, so that an input keeps its hash in another format.
    """
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point():
        values = values.to(torch.bfloat16).view(torch.int16)
    flat = values.reshape(groups, -1).to(torch.int64)
    return (flat + 1).mul(_first(flat.shape[1], flat.device, signs=False)).sum(-1)


def fold(found: np.ndarray, width: int) -> np.ndarray:
    """A sketch [groups, n] with ``width`` numbers a group: that of larger blocks."""
    groups, n = found.shape
    if n <= width:
        return found
    folded: np.ndarray = found.reshape(groups, width, n // width).sum(-1)
    return folded
