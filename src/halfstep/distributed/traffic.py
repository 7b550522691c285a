"""Bytes that each rank sends over the network in one optimizer step, by strategy.

Formulas count what a rank hands to its neighbour; it receives as much. They hold for ring
algorithms, which send the least that is possible; a tree sends no less in total. A number is
rounded up to whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in one optimizer step; sums with ``+``."""

    gradients: int = 0
    """Sums of gradients over the ranks with different data."""
    parameters: int = 0
    """Parts of sharded parameters, gathered for forward and backward."""
    activations: int = 0
    """Partial sums of activations, and of their gradients, within tensor-parallel layers."""

    @property
    def total(self) -> int:
        """Bytes of gradients, parameters and activations together."""
        return self.gradients + self.parameters + self.activations

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            gradients=self.gradients + other.gradients,
            parameters=self.parameters + other.parameters,
            activations=self.activations + other.activations,
        )


def all_gather(payload: int, ranks: int) -> int:
    """Bytes a rank sends so that every rank has all ``payload`` bytes, of which it has one part.

    It sends (or passes on) every part but one: (n - 1) / n of the payload for n ranks.

    **Source:** Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69, 2009.
    """
    return -(-(ranks - 1) * payload // ranks)


def reduce_scatter(payload: int, ranks: int) -> int:
    """Bytes a rank sends so that every rank has one part of the sum of ``payload`` bytes.

    The same as :func:`all_gather`, run backwards; an exchange of equal parts (all-to-all) sends as
    much.
    """
    return all_gather(payload, ranks)


def all_reduce(payload: int, ranks: int) -> int:
    """Bytes a rank sends so that every rank has the sum of ``payload`` bytes: 2 (n - 1) / n of it.

    A reduce-scatter and an all-gather; no algorithm sends less (Patarasu and Yuan 2009).
    """
    return -(-2 * (ranks - 1) * payload // ranks)


def data_parallel(parameters: int, ranks: int, *, reduce_bytes: int) -> Traffic:
    """Data parallelism with whole copies of the model: one all-reduce of the gradients per step.

    Sums in two levels, within machines of k ranks and between m machines, send as much:
    all_reduce(S, k) + all_reduce(S / k, m) = all_reduce(S, k m). Only the second part leaves the
    machine.

    Args:
        parameters: Trainable numbers in the model.
        ranks: With different data.
        reduce_bytes: Of one number on the wire: 4, or 2 where ``reduce_dtype`` is 16 bit.

    **Source:** Rajbhandari et al., "ZeRO", SC 2020, section 7.1: about twice the model's size.
    """
    return Traffic(gradients=all_reduce(parameters * reduce_bytes, ranks))


def fully_sharded(
    parameters: int,
    ranks: int,
    *,
    gather_bytes: int,
    reduce_bytes: int,
    micro_batches: int = 1,
    reshard_after_forward: bool = True,
) -> Traffic:
    """FSDP2: parameters are gathered for forward and for backward, gradients reduce-scattered.

    Args:
        parameters: Numbers in the model; trainable all.
        ranks: That hold a part of every parameter.
        gather_bytes: Of one number while parameters are gathered.
        reduce_bytes: Of one number while gradients are summed.
        micro_batches: Per step; each gathers anew, and sums its gradients.
        reshard_after_forward: Whether backward gathers again; without, one gather serves both.

    **Source:** Rajbhandari et al. 2020, section 7.2.2 (P_os+g+p): 3 times the model's size, 1.5
    times data parallelism's.
    """
    gathers = micro_batches * (2 if reshard_after_forward else 1)
    return Traffic(
        parameters=gathers * all_gather(parameters * gather_bytes, ranks),
        gradients=micro_batches * reduce_scatter(parameters * reduce_bytes, ranks),
    )


def tensor_parallel(
    tokens: int,
    width: int,
    blocks: int,
    ranks: int,
    *,
    activation_bytes: int,
    micro_batches: int = 1,
    recomputed: bool = False,
) -> Traffic:
    """Tensor parallelism of transformer blocks: four all-reduces per block and micro-batch.

    In forward after attention and after the MLP, in backward before each. With sequence
    parallelism each is a reduce-scatter and an all-gather instead: the same bytes. Embedding and
    loss over a sharded vocabulary are not counted.

    Args:
        tokens: Of one micro-batch on this tensor group.
        width: Of the residual stream: numbers per token.
        blocks: Transformer blocks.
        ranks: That share every matrix product.
        activation_bytes: Of one number: 2 in 16 bits.
        micro_batches: Per step.
        recomputed: Whether backward runs each block's forward again (activation checkpointing),
            which adds its two all-reduces.

    **Source:** Shoeybi et al., "Megatron-LM", 2019, section 3 and figure 4; for sequence
    parallelism Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022, section 4.2.2.
    """
    one = all_reduce(tokens * width * activation_bytes, ranks)
    return Traffic(activations=(6 if recomputed else 4) * blocks * micro_batches * one)
