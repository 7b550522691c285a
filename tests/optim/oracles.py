"""One step of each optimizer in fp64, from its paper or torch's documentation, with an error bound.

Each returns the new weight and moments, and for each of them the largest error that fp32 arithmetic
may make. The bound is the usual one of floating-point analysis: replace every term by its absolute
value, and allow one unit of 2^-24 for each of the at most ``OPERATIONS`` roundings on the way, the
constants' own included. fp32's smallest normal number stands for results that are subnormal.
"""

import numpy as np

from halfstep.optim.state import FELL_BACK

UNIT = 2.0**-24
OPERATIONS = 14
TINY = 2.0**-126
Result = dict[str, tuple[np.ndarray, np.ndarray]]


def _bound(magnitude: np.ndarray) -> np.ndarray:
    return OPERATIONS * UNIT * magnitude + TINY


def adamw(w, g, state, t, *, lr, betas, eps, weight_decay) -> Result:
    """**Source:** Loshchilov and Hutter, ICLR 2019, algorithm 2, with torch's use of lr and decay.

    w <- w - lr decay w; m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
    w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """
    b1, b2 = betas
    m = b1 * state["exp_avg"] + (1 - b1) * g
    v = b2 * state["exp_avg_sq"] + (1 - b2) * g**2
    below = np.sqrt(v / (1 - b2**t)) + eps
    moved = w - lr * weight_decay * w - lr * (m / (1 - b1**t)) / below
    m_size = b1 * np.abs(state["exp_avg"]) + (1 - b1) * np.abs(g)
    size = np.abs(w) + lr * (m_size / (1 - b1**t)) / below
    return {
        "weight": (moved, _bound(size)),
        "exp_avg": (m, _bound(m_size)),
        "exp_avg_sq": (v, _bound(v)),
    }


def sgd(w, g, state, t, *, lr, momentum, dampening, weight_decay, nesterov) -> Result:
    """**Source:** the pseudo-code of torch.optim.SGD: the buffer starts as the first gradient."""
    g_size = np.abs(g) + weight_decay * np.abs(w)
    g = g + weight_decay * w
    held = state["momentum_buffer"]
    if momentum == 0 or t == 1:
        buffer, buffer_size = g, g_size
    else:
        buffer = momentum * held + (1 - dampening) * g
        buffer_size = momentum * np.abs(held) + (1 - dampening) * g_size
    step, step_size = buffer, buffer_size
    if nesterov:
        step, step_size = g + momentum * buffer, g_size + momentum * buffer_size
    return {
        "weight": (w - lr * step, _bound(np.abs(w) + lr * step_size)),
        "momentum_buffer": (buffer, _bound(buffer_size)),
    }


def lion(w, g, state, t, *, lr, betas, weight_decay) -> Result:
    """**Source:** Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.

    u <- sign(b1 m + (1 - b1) g); w <- w - lr (u + decay w); m <- b2 m + (1 - b2) g

    Where the sign's argument is within its own rounding error, the bound allows either sign.
    """
    b1, b2 = betas
    m = state["exp_avg"]
    argument = b1 * m + (1 - b1) * g
    doubtful = np.abs(argument) <= _bound(b1 * np.abs(m) + (1 - b1) * np.abs(g))
    bound = _bound(np.abs(w) + lr)
    return {
        "weight": (w - lr * (np.sign(argument) + weight_decay * w), bound + 2 * lr * doubtful),
        "exp_avg": (b2 * m + (1 - b2) * g, _bound(b2 * np.abs(m) + (1 - b2) * np.abs(g))),
    }


def fallen_back(optimizer) -> tuple[str, ...]:
    """The parameters whose 8-bit moments have become bf16, by name or by shape."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return tuple(optimizer._name(p) for p in every if FELL_BACK in optimizer.state.get(p, {}))
