"""A GPT with a data loader, an optimiser, a schedule and an evaluation of its own."""

import math
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig, example_batch, loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]

TRAINED, HELD_OUT = 48, 12
"""Samples; a pass through the former takes three steps of 16."""


def build_model():
    return GPT(GPTConfig(n_layer=4))


def samples(count, seed):
    tokens = torch.randint(0, 128, (count, 17), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:].contiguous())


def data_loader(rank, world_size, microbatch_size, seed):
    data = samples(TRAINED, 1)
    sampler = DistributedSampler(data, world_size, rank, seed=seed, drop_last=True)
    return DataLoader(data, batch_size=microbatch_size, sampler=sampler, drop_last=True)


def configure_optimizer(named_parameters):
    """NAdam keeps two numbers and two tensors of each parameter."""
    groups = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[parameter.ndim >= 2 and "wpe" not in name].append(parameter)
    return torch.optim.NAdam(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "lr": 2e-3}],
        lr=1e-3,
        decoupled_weight_decay=True,
    )


def lr_schedule(step):
    return min((step + 1) / 2, math.cos(step / 10))


def evaluate(model, step):
    """Ranks may read different numbers of the held-out batches."""
    batches = list(DataLoader(samples(HELD_OUT, 2), batch_size=model.microbatch_size))
    mine = batches[model.data_parallel_rank :: model.data_parallel_size]
    return {"validation_loss": model.evaluate(mine), "factor": lr_schedule(step)}
