"""Image classifiers of timm: its own test models, and small members of other families."""

from __future__ import annotations

import timm
import torch
import torch.nn.functional as F

from strangers.packages.hand_loop import by_hand

BATCH_NORM = "keep_fp32=type:BatchNorm*"


def made(name: str, size: int, rule: str = "", lr: float = 1e-3, amplifies: float = 1.0, **options):
    def model():
        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    def batch(draw):
        labels = torch.randint(10, (4,), generator=draw)
        images = torch.randn(4, 3, size, size, generator=draw) + labels.view(-1, 1, 1, 1) / 5
        return images, labels

    def loss(model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    return by_hand(
        name, "timm", rule, model=model, batch=batch, loss=loss, lr=lr, amplifies=amplifies
    )


PROGRAMS = [
    made("test_vit", 32, img_size=32),
    made("test_convnext", 32),
    made("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=48, depth=2, num_heads=3),
    made(
        "swin_tiny_patch4_window7_224", 28,
        img_size=28, embed_dim=24, depths=(1, 1), num_heads=(2, 4),
    ),
    made("test_resnet", 32, BATCH_NORM),
    # Adam's first step is the sign of a gradient: its normalised squeezes have many near 0
    made("mobilenetv3_small_050", 64, BATCH_NORM, amplifies=2.0),
    made("test_efficientnet", 64, BATCH_NORM),
]  # fmt: skip
