"""Autocast is seen and switched off where the models say so."""

from __future__ import annotations

import torch

from halfstep.models.islands import autocast_is_on, autocast_off, matmul_dtype


def test_autocast_off_is_off_inside_and_on_again_after():
    with torch.autocast("cpu", torch.bfloat16):
        with autocast_off("cpu"):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with autocast_off("cpu"):
        assert not torch.is_autocast_enabled("cpu")


def test_devices_without_autocast_are_never_on():
    assert not autocast_is_on("meta")
    with torch.autocast("cpu", torch.bfloat16), autocast_off("meta"):
        assert torch.is_autocast_enabled("cpu")


def test_matmul_dtype_is_autocasts_or_the_wider_operand():
    f32, bf16, f16, f64 = (
        torch.zeros(1, dtype=d)
        for d in (torch.float32, torch.bfloat16, torch.float16, torch.double)
    )
    assert matmul_dtype(bf16, bf16) == torch.bfloat16
    assert matmul_dtype(bf16, f32) == torch.float32
    assert matmul_dtype(f16, bf16) == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert matmul_dtype(f32, f32) == torch.float16
        assert matmul_dtype(bf16, bf16) == torch.float16
        assert matmul_dtype(f64, f32) == torch.float64
        # On another device this autocast does not count.
        assert matmul_dtype(f32.to("meta"), f32.to("meta")) == torch.float32
