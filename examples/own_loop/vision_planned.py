"""A vision model trained under a plan: `vision_single.py` with the model in `parallelize`.

plan vision_model.py --gpus 4 --out plans/vision --global-batch-size 16
torchrun --standalone --nproc-per-node 4 vision_planned.py --images images.pt --plan plans/vision
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from vision_model import ViT

import planner.runtime

EPOCHS = 2


def configure_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05, momentum=0.9)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    options = parser.parse_args(arguments)
    images, labels = torch.load(options.images)
    trained, held_out = TensorDataset(images[:-32], labels[:-32]), (images[-32:], labels[-32:])
    torch.manual_seed(0)
    model = planner.runtime.parallelize(
        ViT(), options.plan, configure_optimizer=configure_optimizer
    )
    rank, size = model.data_parallel_rank, model.data_parallel_size
    sampler = DistributedSampler(trained, size, rank, shuffle=False)
    loader = DataLoader(trained, batch_size=model.batch_size, sampler=sampler, drop_last=True)
    (optimizer,) = model.optimizers  # one for each stage of this rank
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    losses = []
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = model.step(batch)
            scheduler.step()
            losses.append(loss.item())
        losses.append(model.evaluate([[tensor.chunk(size)[rank] for tensor in held_out]]))
        print(f"epoch {epoch}: held out {losses[-1]:.4f}")
    model.close()
    return losses


if __name__ == "__main__":
    main()
