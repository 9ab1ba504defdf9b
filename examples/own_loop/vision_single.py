"""A vision model trained on a file of images, on one device, by the usual loop.

python vision_single.py --images images.pt
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from vision_model import ViT, loss_fn

BATCH_SIZE, EPOCHS = 16, 2


def configure_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05, momentum=0.9)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    options = parser.parse_args(arguments)
    images, labels = torch.load(options.images)
    trained, held_out = TensorDataset(images[:-32], labels[:-32]), (images[-32:], labels[-32:])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ViT().to(device)
    loader = DataLoader(trained, batch_size=BATCH_SIZE, drop_last=True)
    optimizer = configure_optimizer(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    losses = []
    for epoch in range(EPOCHS):
        for batch in loader:
            inputs, targets = (tensor.to(device) for tensor in batch)
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            inputs, targets = (tensor.to(device) for tensor in held_out)
            losses.append(loss_fn(model(inputs), targets).item())
        model.train()
        print(f"epoch {epoch}: held out {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
