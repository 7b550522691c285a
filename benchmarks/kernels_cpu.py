"""The compiled kernels beside torch's own operators on bf16 tensors of a CPU, shape by shape.

    python benchmarks/kernels_cpu.py [--rounds N] [--threads N] [--only attention activation ...]

Each line is one call forward and backward ("queries": forward alone), ours and torch's in turn in
one process; the ratio is the median over the rounds of torch's time over ours. Freed memory is
kept, as in `halfstep train`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F

from common import save
from halfstep.kernels import attention, rows
from halfstep.trainer.environment import keep_freed_memory

Pair = tuple[str, Callable[[], object], Callable[[], object]]
LOW = torch.bfloat16


def attentions() -> Iterator[Pair]:
    """Forty shapes: length, batch and heads, head size, and the kind of mask."""
    lengths = ((1, 16), (16, 64), (8, 128), (4, 256), (4, 384), (2, 512), (1, 1024), (1, 2048))
    kinds = itertools.cycle(("causal", "plain", "padded"))
    for (batch, length), (heads, channels) in itertools.product(
        lengths, ((12, 64), (6, 64), (8, 32), (4, 128), (12, 80))
    ):
        yield _attention(batch, heads, length, channels, next(kinds))


def queries() -> Iterator[Pair]:
    """Forward alone: a step of generation, few queries, and heads that share keys."""
    for batch, heads, key_heads, count, keys in (
        *((1, 12, 12, n, 512) for n in (1, 8, 16, 32)),
        *((8, 12, 12, 1, 512), (1, 8, 1, 512, 512), (1, 8, 2, 512, 512), (1, 1, 1, 1024, 1024)),
    ):
        yield _queries(batch, heads, key_heads, count, keys)


def _queries(batch: int, heads: int, key_heads: int, count: int, keys: int) -> Pair:
    q = torch.randn(batch, heads, count, 64).to(LOW)
    k, v = torch.randn(2, batch, key_heads, keys, 64).to(LOW)

    @torch.no_grad()
    def ours() -> None:
        attention.attention(q, k, v, None, 0.0, False, None)

    @torch.no_grad()
    def torchs() -> None:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != key_heads)

    return f"attention of {count} queries, {keys} keys, {batch} x {heads}|{key_heads}", ours, torchs


def _attention(batch: int, heads: int, length: int, channels: int, kind: str) -> Pair:
    packed = torch.randn(batch, length, heads, 3, channels).to(LOW).requires_grad_()
    mask = None
    if kind == "padded":
        seen = torch.randint(length // 2, length + 1, (batch, 1, 1, 1))
        mask = torch.arange(length).expand(batch, 1, 1, length) < seen
    up = torch.randn(batch, length, heads, channels).to(LOW).transpose(1, 2)
    causal = kind == "causal"

    def ours() -> None:
        q, k, v = packed.transpose(1, 2).unbind(3)
        attention.attention(q, k, v, mask, 0.0, causal, None).backward(up)
        packed.grad = None

    def torchs() -> None:
        q, k, v = packed.transpose(1, 2).unbind(3)
        F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).backward(up)
        packed.grad = None

    return f"attention {batch} x {heads} x {length} x {channels} {kind}", ours, torchs


def activations() -> Iterator[Pair]:
    for count in (2**14, 2**18, 2**22):
        x, up = torch.randn(count).to(LOW).requires_grad_(), torch.randn(count).to(LOW)

        def ours(x=x, up=up) -> None:
            rows.gelu_tanh(x).backward(up)
            x.grad = None

        def torchs(x=x, up=up) -> None:
            F.gelu(x, approximate="tanh").backward(up)
            x.grad = None

        yield f"gelu (tanh) {count}", ours, torchs


def losses() -> Iterator[Pair]:
    for count, vocab in ((512, 256), (64, 1000), (2048, 1000), (512, 8192), (128, 50257)):
        for dtype in (LOW, torch.float32):
            x = torch.randn(count, vocab).to(dtype).requires_grad_()
            targets = torch.randint(vocab, (count,))

            def ours(x=x, targets=targets) -> None:
                rows.cross_entropy(x, targets, -100).mean().backward()
                x.grad = None

            def torchs(x=x, targets=targets) -> None:
                F.cross_entropy(x.float(), targets).backward()
                x.grad = None

            name = "bf16" if dtype == LOW else "fp32"
            yield f"cross-entropy {count} x {vocab} {name}", ours, torchs


def norms() -> Iterator[Pair]:
    """As strangers' models call them, to fp32; then LayerNorm before a product, to bf16."""
    for count, width in ((64, 256), (2048, 384), (1024, 768), (4096, 1024)):
        for kind, of in (("rms", torch.float32), ("rms", LOW), ("layer", LOW), ("product", LOW),
                         ("product", torch.float32)):  # fmt: skip
            yield _norm(count, width, kind, of)


def _norm(count: int, width: int, kind: str, of: torch.dtype) -> Pair:
    gain, bias = torch.ones(width, requires_grad=True), torch.zeros(width, requires_grad=True)
    x = torch.randn(count, width).to(of).requires_grad_()
    to = LOW if kind == "product" else torch.float32
    up = torch.randn(count, width).to(to)

    def ours() -> None:
        shift = None if kind == "rms" else bias
        rows.norm(x, gain, shift, 1e-5, to, centred=kind != "rms").backward(up)
        x.grad = gain.grad = bias.grad = None

    def torchs() -> None:
        if kind == "rms":
            y = F.rms_norm(x.float(), gain.shape, gain, 1e-5)
        else:
            y = F.layer_norm(x.float(), gain.shape, gain, bias)
        y.to(to).backward(up)
        x.grad = gain.grad = bias.grad = None

    name = {"rms": "RMSNorm", "layer": "LayerNorm", "product": "LayerNorm before a product"}[kind]
    return f"{name} {count} x {width} of {'bf16' if of == LOW else 'fp32'}", ours, torchs


GROUPS = {
    "attention": attentions,
    "queries": queries,
    "activation": activations,
    "loss": losses,
    "norm": norms,
}


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    results = {}
    print(f"{'forward and backward, ms':<44} {'ours':>8} {'torch':>8} {'ratio':>6}")
    for name, ours, torchs in (pair for group in arguments.only for pair in GROUPS[group]()):
        mine, theirs = [], []
        for _ in range(arguments.rounds + 2):
            mine.append(timed(ours))
            theirs.append(timed(torchs))
        ratio = median(b / a for a, b in zip(mine[2:], theirs[2:], strict=True))
        row = {"ours_ms": median(mine[2:]) * 1e3, "torch_ms": median(theirs[2:]) * 1e3}
        results[name] = {**row, "ratio": ratio}
        print(f"{name:<44} {row['ours_ms']:>8.3f} {row['torch_ms']:>8.3f} {ratio:>6.2f}")
    if not arguments.no_save:
        found = {"threads": arguments.threads, "rounds": arguments.rounds, "rows": results}
        print(f"written: {save('kernels-cpu', found, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
