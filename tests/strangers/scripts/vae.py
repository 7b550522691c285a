"""A variational autoencoder: BCE summed over pixels, sampling in the forward, decode by itself."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

PIXELS, HIDDEN, LATENT = 144, 48, 6


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(PIXELS, HIDDEN)
        self.fc21 = nn.Linear(HIDDEN, LATENT)
        self.fc22 = nn.Linear(HIDDEN, LATENT)
        self.fc3 = nn.Linear(LATENT, HIDDEN)
        self.fc4 = nn.Linear(HIDDEN, PIXELS)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, PIXELS))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def pictures(count, seed):
    """Bright spots on a dark ground, with values from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 2, 1, 1, generator=generator) * 8 + 2
    grid = torch.stack(torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij"))
    squares = (grid - centre).square().sum(1, keepdim=True)
    return TensorDataset(torch.exp(-squares / 6), torch.zeros(count))


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, PIXELS), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    train_loader = DataLoader(pictures(512, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(pictures(128, 2), batch_size=args.batch_size, shuffle=False)

    model = VAE().to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    losses = []

    def train(epoch):
        model.train()
        train_loss = 0
        for batch_idx, (data, _) in enumerate(train_loader):
            data = data.to(device)
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            losses.append(loss.item() / len(data))
            optimizer.step()
            if batch_idx % args.log_interval == 0:
                print(f"epoch {epoch} [{batch_idx}] loss {loss.item() / len(data):.6f}")
        print(f"epoch {epoch} average loss {train_loss / len(train_loader.dataset):.4f}")

    def test(epoch):
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for data, _ in test_loader:
                data = data.to(device)
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
        test_loss /= len(test_loader.dataset)
        losses.append(test_loss)
        print(f"epoch {epoch} test loss {test_loss:.4f}")

    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test(epoch)
        with torch.no_grad():
            sample = torch.randn(16, LATENT).to(device)
            sample = model.decode(sample).cpu()
            losses.append(sample.view(16, 1, 12, 12).mean().item())
    return losses


if __name__ == "__main__":
    main()
