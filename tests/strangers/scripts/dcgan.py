"""A generator against a discriminator: two networks, two optimizers, three backwards a round."""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.05)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf, nc):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf, nc):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


def pictures(count):
    """Smooth waves of 16 x 16 in two channels, between -1 and 1."""
    generator = torch.Generator().manual_seed(0)
    phase, speed = torch.rand(2, count, 2, 1, 1, generator=generator)
    line = torch.arange(16.0)
    waves = torch.sin(6 * phase + (0.2 + 0.6 * speed) * (line[:, None] + line[None, :]))
    return TensorDataset(waves, torch.zeros(count))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--nz", type=int, default=16)
    parser.add_argument("--ngf", type=int, default=8)
    parser.add_argument("--ndf", type=int, default=8)
    parser.add_argument("--niter", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.0005)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=3)
    opt = parser.parse_args()
    torch.manual_seed(opt.seed)
    device = torch.device("cpu")
    nc = 2
    dataloader = DataLoader(pictures(480), batch_size=opt.batch_size, shuffle=True)

    netG = Generator(opt.nz, opt.ngf, nc).to(device)
    netG.apply(weights_init)
    netD = Discriminator(opt.ndf, nc).to(device)
    netD.apply(weights_init)

    criterion = nn.BCELoss()
    fixed_noise = torch.randn(opt.batch_size, opt.nz, 1, 1, device=device)
    real_label = 1
    fake_label = 0
    optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    losses = []

    for epoch in range(opt.niter):
        for i, data in enumerate(dataloader, 0):
            # the discriminator: real pictures
            netD.zero_grad()
            real = data[0].to(device)
            batch_size = real.size(0)
            label = torch.full((batch_size,), real_label, dtype=real.dtype, device=device)
            output = netD(real)
            errD_real = criterion(output, label)
            errD_real.backward()
            D_x = output.mean().item()

            # and those of the generator
            noise = torch.randn(batch_size, opt.nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()

            # the generator: its pictures should pass for real ones
            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            D_G_z2 = output.mean().item()
            optimizerG.step()

            losses += [errD.item(), errG.item()]
            print(f"[{epoch}][{i}] D {errD.item():.4f} G {errG.item():.4f} {D_x:.4f} {D_G_z2:.4f}")
        fake = netG(fixed_noise)
        losses.append(fake.detach().square().mean().item())
    return losses


if __name__ == "__main__":
    main()
