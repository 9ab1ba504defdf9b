"""The process group, and where a rank stands in the mesh."""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def process_group(world_size: int, timeout_s: float) -> Iterator[torch.device]:
    """Join the process group that torchrun started, and leave it in good order.

    Yields:
        The device of this rank: its GPU with NCCL, or the CPU with gloo.

    Raises:
        RuntimeError: torchrun started another number of processes than the plan has devices.
    """
    if dist.is_initialized():
        yield local_device()
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise RuntimeError(
            f"this plan is for {world_size} processes, but {started} were started: run "
            f"torchrun --standalone --nproc-per-node {world_size} {sys.argv[0]}, "
            "or python with --reference for one process"
        )
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", "0")
    device = local_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    dist.barrier()  # without it, ranks that leave early abort the others
    dist.destroy_process_group()


def leave() -> NoReturn:
    """End the process at once after a run that went well.

    When the interpreter takes gloo's threads down one by one, it sometimes aborts ("terminate
    called without an active exception"), and torchrun then reports a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def local_device() -> torch.device:
    """Return the device of this rank, and make it torch's current one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        torch.set_num_threads(1)  # the ranks share the cores of this machine
    return torch.device("cpu")


def data_parallel_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's position among the ranks that read different samples, and their count."""
    rank, size = 0, 1
    for axis in ("dp_replicate", "dp_shard"):
        if axis in axis_names(mesh):
            rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
            size *= mesh[axis].size()
    return rank, size


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes."""
    return mesh.mesh_dim_names or ()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
