"""Bytes that each rank sends over the network in one optimizer step, by strategy.

The formulas count the bytes that a rank sends; it receives as many. They hold for ring algorithms,
which send the least that is possible; a tree sends no less in total. Results are rounded up to
whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in one optimizer step; ``+`` adds them up."""

    gradients: int = 0
    """Bytes for sums of gradients over the ranks with different data."""
    parameters: int = 0
    """Bytes for gathering sharded parameters in forward and backward."""
    activations: int = 0
    """Bytes for partial sums of activations and their gradients in tensor-parallel layers."""

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
    """Bytes that a rank sends so that every rank has all ``payload`` bytes, each holding one part.

    It sends or passes on every part but one: (n - 1) / n of the payload for n ranks.

    **Source:** Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69, 2009.
    """
    return -(-(ranks - 1) * payload // ranks)


def reduce_scatter(payload: int, ranks: int) -> int:
    """Bytes that a rank sends so that every rank has one part of the sum of ``payload`` bytes.

    This is :func:`all_gather` run backwards; an exchange of equal parts (all-to-all) sends as much.
    """
    return all_gather(payload, ranks)


def all_reduce(payload: int, ranks: int) -> int:
    """Bytes that a rank sends so that all have the sum of ``payload`` bytes: 2 (n - 1) / n of them.

    It is a reduce-scatter and an all-gather; no algorithm sends less (Patarasu and Yuan 2009).
    """
    return -(-2 * (ranks - 1) * payload // ranks)


def data_parallel(parameters: int, ranks: int, *, reduce_bytes: int) -> Traffic:
    """Traffic of data parallelism with whole model copies: one gradient all-reduce per step.

    Sums in two levels, within machines of k ranks and between m machines, send as much:
    all_reduce(S, k) + all_reduce(S / k, m) = all_reduce(S, k m). Only the second part leaves the
    machine.

    Args:
        parameters: Elements of the model's trainable parameters.
        ranks: Number of ranks with different data.
        reduce_bytes: Bytes of one element on the wire: 4, or 2 where ``reduce_dtype`` is 16-bit.

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
    """Traffic of FSDP2: gathers parameters for forward and backward, reduce-scatters gradients.

    Args:
        parameters: Elements of the model's parameters, all of them trainable.
        ranks: Number of ranks that each hold a part of every parameter.
        gather_bytes: Bytes of one element while parameters are gathered.
        reduce_bytes: Bytes of one element while gradients are summed.
        micro_batches: Micro-batches per step; each gathers anew, and sums its gradients.
        reshard_after_forward: Whether backward gathers again; if not, one gather serves both.

    **Source:** Rajbhandari et al. 2020, section 7.2.2 (P_os+g+p): 3 times the model's size, 1.5
    times data parallelism's.
    """
    gathers = micro_batches * (2 if reshard_after_forward else 1)
    return Traffic(
        parameters=gathers * all_gather(parameters * gather_bytes, ranks),
        gradients=micro_batches * reduce_scatter(parameters * reduce_bytes, ranks),
    )
