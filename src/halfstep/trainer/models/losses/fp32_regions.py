"""Keeps chosen operations out of autocast's hands, alike on every device type.

Autocast decides per device which operations run in 16 bits: CUDA's list sends ``layer_norm`` to
fp32, CPU's list does not. A model that relies on the list computes different numbers on the two.
The operations whose dtype matters (norm statistics, logits, loss) are therefore islands: autocast
is switched off around them and they say themselves what they compute in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

# A constant to ``torch.compile``, which in torch 2.11 cannot trace the question. Its decorator for
# that, assume_constant_result, would import the compiler: as long as torch itself.
_WITH_AUTOCAST = frozenset(k for k in ("cpu", "cuda", "xpu") if torch.amp.is_autocast_available(k))


def autocast_is_on(device_type: str) -> bool:
    """True if autocast is active now for ``device_type``; False where torch has none ("meta")."""
    # is_autocast_enabled raises on device types without autocast, so availability comes first.
    return device_type in _WITH_AUTOCAST and torch.is_autocast_enabled(device_type)


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast does nothing for ``device_type``; free where it is off already.

    Args:
        device_type: ``tensor.device.type`` of the operands.
    """
    if autocast_is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def matmul_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which ``x @ weight.T`` must run to honour the caller's autocast.

    Under autocast it is autocast's dtype for the device of ``x`` (fp64 is left alone, as autocast
    itself does); otherwise the smallest dtype that holds both operands exactly.

    Args:
        x: Any floating tensor; only its dtype and device are read.
        weight: Likewise.
    """
    promoted = torch.promote_types(x.dtype, weight.dtype)
    if promoted != torch.float64 and autocast_is_on(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return promoted
