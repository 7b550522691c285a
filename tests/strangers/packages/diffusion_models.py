"""diffusers: the noise of DDPM learned by its UNets, and its autoencoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiTTransformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)

from strangers.packages.hand_loop import by_hand

SCHEDULE = DDPMScheduler(num_train_timesteps=1000)
IMAGES, SIZE = 2, 8


def image_batch(draw):
    """Images, noise and timesteps; words for the conditioned model."""
    return {
        "clean": torch.randn(IMAGES, 3, SIZE, SIZE, generator=draw).tanh(),
        "noise": torch.randn(IMAGES, 3, SIZE, SIZE, generator=draw),
        "timesteps": torch.randint(0, 1000, (IMAGES,), generator=draw),
        "words": torch.randn(IMAGES, 5, 16, generator=draw),
        "labels": torch.randint(0, 4, (IMAGES,), generator=draw),
    }


def noise_loss(model, batch, **conditions):
    noisy = SCHEDULE.add_noise(batch["clean"], batch["noise"], batch["timesteps"])
    guess = model(noisy, batch["timesteps"], return_dict=False, **conditions)[0]
    return F.mse_loss(guess, batch["noise"])


def unet():
    return UNet2DModel(
        sample_size=SIZE, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip


def conditioned_unet():
    return UNet2DConditionModel(
        sample_size=SIZE, in_channels=3, out_channels=3, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def transformer():
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=3, out_channels=3, num_layers=2,
        sample_size=SIZE, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip


def autoencoder():
    return AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2, sample_size=SIZE,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )  # fmt: skip


def autoencoder_loss(model, batch):
    """By ``encode`` and ``decode``, which are not ``forward``; the noise is the batch's own.

    ``sample()`` would draw it in the format of the weights, other numbers in each.
    """
    latent = model.encode(batch["clean"]).latent_dist
    _, channels, height, width = latent.mean.shape
    noise = batch["noise"][:, :channels, :height, :width]
    image = model.decode(latent.mean + latent.std * noise).sample
    return F.mse_loss(image, batch["clean"]) + 1e-4 * latent.kl().mean()


PROGRAMS = [
    by_hand("UNet2DModel", "diffusers", model=unet, batch=image_batch, loss=noise_loss),
    by_hand(
        "UNet2DConditionModel", "diffusers", model=conditioned_unet, batch=image_batch,
        loss=lambda model, batch: noise_loss(model, batch, encoder_hidden_states=batch["words"]),
    ),
    by_hand(
        "DiTTransformer2DModel", "diffusers", model=transformer, batch=image_batch,
        loss=lambda model, batch: noise_loss(model, batch, class_labels=batch["labels"]),
    ),
    by_hand(
        "AutoencoderKL", "diffusers", model=autoencoder, batch=image_batch, loss=autoencoder_loss,
    ),
]  # fmt: skip
