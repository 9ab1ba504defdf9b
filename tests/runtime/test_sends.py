"""What stages rely on when they let go of gradients that are on their way."""

import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import StorageWeakRef

SIZE = 4_000_000


def exchange(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    if rank == 0:
        sent = torch.ones(SIZE)
        storage = StorageWeakRef(sent.untyped_storage())
        ops = [dist.P2POp(dist.isend, sent, 1)]
        works = dist.batch_isend_irecv(ops)
        ops.clear()
        del sent
        gc.collect()
        assert not storage.expired()
        for _ in range(20):
            torch.zeros(SIZE)  # would lie where it was
        while works:
            works.pop().wait()
        gc.collect()
        assert storage.expired()
    else:
        time.sleep(1)
        received = torch.empty(SIZE)
        dist.recv(received, 0)
        assert bool((received == 1).all())
    dist.destroy_process_group()


def test_a_send_that_has_begun_holds_what_it_sends(tmp_path):
    mp.spawn(exchange, args=(str(tmp_path),), nprocs=2)
