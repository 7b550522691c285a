"""Pictures by a small residual net: SGD with momentum, accuracies, a checkpoint and a resume."""

import argparse
import os
import shutil
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {float(self.val):.4f} ({float(self.avg):.4f})"


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        counts = [correct[:k].reshape(-1).float().sum(0, keepdim=True) for k in topk]
        return [count.mul_(100.0 / target.size(0)) for count in counts]


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    losses, top1, top5 = AverageMeter("loss"), AverageMeter("acc@1"), AverageMeter("acc@5")
    seen = []
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))
        seen.append(loss.item())

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if i % args.print_freq == 0:
            print(f"epoch {epoch} [{i}/{len(train_loader)}]", losses, top1, top5)
    return seen


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter("loss"), AverageMeter("acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            loss = criterion(output, target)
            (acc1,) = accuracy(output, target, topk=(1,))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
    print(" *", losses, top1)
    return top1.avg, losses.avg


def save_checkpoint(state, is_best, folder):
    filename = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(folder, "model_best.pth.tar"))


def pictures(count, seed, classes=8):
    patterns = torch.randn(classes, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, 3, 12, 12, generator=generator)
    return TensorDataset(patterns[labels] + noise, labels)


def worker(args):
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    best_acc1 = 0

    model = ResNet(8)
    model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)

    if args.resume:
        checkpoint = torch.load(args.resume)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    train_loader = DataLoader(pictures(256, 1), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(pictures(96, 2), batch_size=args.batch_size, shuffle=False)
    seen = []
    for epoch in range(args.start_epoch, args.epochs):
        seen += train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1, val_loss = validate(val_loader, model, criterion)
        scheduler.step()
        seen.append(val_loss)

        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            is_best,
            args.folder,
        )
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--print-freq", type=int, default=4)
    parser.add_argument("--resume", default="")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as args.folder:
        seen = worker(args)
        # as somebody does who asks for another epoch the next day
        args.resume, args.epochs = os.path.join(args.folder, "checkpoint.pth.tar"), args.epochs + 1
        return seen + worker(args)


if __name__ == "__main__":
    main()
