"""Parameters, gradients and optimiser states in host memory, where the optimiser runs."""

import os

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from .part import Part


def keep_on_host(part: Part) -> None:
    """Let FSDP2 keep this rank's share of the state in host memory, pinned for its copies."""
    on_gpu = part.device.type == "cuda"
    part.offload_policy = CPUOffloadPolicy(pin_memory=on_gpu)
    part.state_device = torch.device("cpu")
    if on_gpu:  # torchrun gives each process one thread, and the optimiser needs its share
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
