"""Parameters that several pipeline stages hold, such as a tied embedding and head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .meshes import axis_names, local_tensor
from .part import named_parameters
from .stages import Stage, StageSpec, stage_units


class SharedParameters:
    """Parameters that several pipeline stages hold, such as a tied embedding and head."""

    def __init__(
        self, stages: Sequence[Stage], specs: Sequence[StageSpec], mesh: DeviceMesh
    ) -> None:
        """Find them; the same list is found on every rank."""
        self._group = mesh["pp"].get_group() if "pp" in axis_names(mesh) else None
        self._rank = mesh["pp"].get_local_rank() if "pp" in axis_names(mesh) else 0
        self._specs = specs
        self._holders: dict[str, list[int]] = {}
        anatomy = stages[0].anatomy
        units = [stage_units(specs, i, len(anatomy.blocks)) for i in range(len(specs))]
        for name, users in anatomy.users.items():
            holders = [i for i, held in enumerate(units) if not users.isdisjoint(held)]
            if len(holders) > 1:
                self._holders[name] = holders
        self._mine: dict[tuple[str, int], nn.Parameter] = {
            (name, stage.index): parameter
            for stage in stages
            for name, parameter in named_parameters(stage)
            if name in self._holders
        }
        self.copies = {
            id(parameter)
            for (name, index), parameter in self._mine.items()
            if index != self._holders[name][0]
        }
        """Ids of parameters that are counted on an earlier stage."""

    def sum_gradients(self) -> None:
        """Give every holder the sum of all holders' gradients, added in stage order."""
        for name, holders in self._holders.items():
            grads = {
                index: local_tensor(parameter.grad)
                for (n, index), parameter in self._mine.items()
                if n == name and parameter.grad is not None
            }
            if not grads:
                continue
            held = self._exchange(holders, grads)
            total, *others = (held[index] for index in holders)
            for other in others:
                total += other
            for grad in grads.values():
                if grad is not total:
                    grad.copy_(total)

    def _exchange(self, holders: list[int], grads: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send this rank's gradients to the other holders, return all of them by stage."""
        received = dict(grads)
        like = next(iter(grads.values()))
        peers = {self._specs[i].pp_rank for i in holders} - {self._rank}
        transfers = []
        for index in holders:
            owner = self._specs[index].pp_rank
            if owner == self._rank:
                sent = received[index].contiguous()
                transfers += [self._transfer(dist.isend, sent, p) for p in peers]
            else:
                received[index] = torch.empty_like(like)
                transfers.append(self._transfer(dist.irecv, received[index], owner))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        return received

    def _transfer(self, kind: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        assert self._group is not None
        return dist.P2POp(kind, tensor, dist.get_global_rank(self._group, peer), self._group)
