"""CUDA without a GPU, for counting: tensors on "cuda" are fake, and what would be launched counts.

:func:`install` changes torch for the whole process, so count in a process of its own. Tensors of
the CPU stay real; what is copied from the device to them is made up. Nothing shows time, cuBLAS
or graphs; a launch is one operator or Triton kernel, whatever the number of tensors it works on,
and to wait for an event, of a copy that began a step ago, is no synchronisation.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.library.Library("aten", "IMPL")
_FREE = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_"),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_pinned"),
}
"""Operators besides views that launch nothing."""


def install() -> None:
    """Have torch take CUDA for an H100 that is there, and run its backward in this thread."""
    torch.autograd.set_multithreading_enabled(False)
    torch._C._ensureCUDADeviceGuardSet()
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment]  # there is none
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies from a CPU
    for name, answer in {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1,
        "current_device": 0, "get_device_capability": (9, 0), "is_current_stream_capturing": False,
        "get_device_name": "NVIDIA H100 80GB HBM3", "manual_seed_all": None,
        "current_stream": mock.MagicMock(), "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, mock.Mock(return_value=answer))
    torch.cuda.device = torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore
    torch.cuda.Event = torch.cuda.Stream = mock.MagicMock  # type: ignore  # all work is done
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    torch.utils._foreach_utils._foreach_supported_types.append(FakeTensor)
    address = torch.Tensor.data_ptr
    torch.Tensor.data_ptr = lambda t: (  # type: ignore
        t.untyped_storage()._cdata * 16 if isinstance(t, FakeTensor) else address(t)
    )
    FakeTensor.tolist = lambda t: t.cpu().tolist()  # type: ignore
    aten.impl("scaled_dot_product_attention", attention, "AutogradCUDA")


def attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention by the kernel that a GPU has for it, where a CPU's torch takes it apart."""
    assert not enable_gqa
    ops, how = torch.ops.aten, (dropout_p, is_causal)
    if q.dtype == torch.float32 or mask is not None:
        kernel = ops._scaled_dot_product_efficient_attention
        return kernel(q, k, v, mask, True, *how, scale=scale)[0]
    return ops._scaled_dot_product_flash_attention(q, k, v, *how, scale=scale)[0]


def some(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the host reads of the device: numbers are 1, counts and flags are 0."""
    dtype = dtype or tensor.dtype
    return torch.full(tensor.shape, float(dtype.is_floating_point), dtype=dtype)


class Count(TorchDispatchMode):
    """Runs what touches "cuda" on fake tensors, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.bytes = self.to_device = self.to_host = 0

    def figures(self) -> dict[str, int]:
        """What was counted; bytes are those that operators and kernels read and write."""
        return {
            "launches": self.launches.total(), "bytes": self.bytes, "to_device": self.to_device,
            "to_host": self.to_host, "syncs": self.waits.total(),
        }  # fmt: skip

    def launch(self, name: str, *values: Any) -> None:
        """Count a launch; tensors that it finds by addresses in a table are not among the bytes."""
        self.launches[name] += 1
        tensors = {id(t): t for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
        self.bytes += sum(t.numel() * t.element_size() for t in tensors.values())

    def wait(self) -> None:
        """Count that the host waits for the device, by the line that asks for it."""
        files = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
        place = [f for f in files if f.filename != __file__][-1]
        self.waits[f"{Path(place.filename).name}:{place.lineno}"] += 1

    def __enter__(self) -> Count:
        """Count from here on, launches of Triton's kernels too."""
        from triton.runtime.jit import JITFunction

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self.launch(kernel.fn.__name__, args, kwargs)

        JITFunction.run, torch.cuda.synchronize = run, lambda *_: self.wait()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator: with fake tensors if one is on the device, else as it is."""
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        kwargs.pop("pin_memory", None)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        ours = any(t.device.type == "cuda" for t in given)
        target = torch.device(kwargs.get("device") or "meta").type
        if name == "_pin_memory":
            return args[0]
        if func._schema.name.startswith("prim") or (not ours and target != "cuda"):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.wait()
            return some(given[0]).item()
        if name == "equal":
            self.wait()
            return True
        if ours and (target == "cpu" or (name == "copy_" and args[0].device.type == "cpu")):
            self.to_host += 1
            if not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:])):
                self.wait()
            if name == "copy_":
                return args[0].copy_(some(args[0]))
            return some(given[0], kwargs.get("dtype"))
        self.to_device += any(t.device.type == "cpu" and t.ndim for t in given)
        if own := OPDEFS.get(func._schema.name):  # an operator of Python: what it calls counts
            with self:
                return own._backend_fns.get("cuda", own._init_fn)(*args, **kwargs)
        with self.fake:
            out = func(*args, **kwargs)
        if not func.is_view and name not in _FREE:
            self.launch(name, args, kwargs, out)
        return out
