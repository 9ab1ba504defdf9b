"""Modules of experts whose experts are on different ranks: tokens go to theirs and come back.

Lepikhin et al. 2021 (2006.16668). Each rank has samples of its own and some of the experts. In
front of such a module its rows are put in the order of their experts and exchanged; the module
runs as it is written on the rows that came, each with one expert; behind it the results go back
and those of a row are added up. Ranks of tp have the same rows, those of cp have parts of the same
samples: each exchanges its part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from .own_experts import OwnExperts
from .processes import RankError
from .split_tensor import Ranks
from .streams import first_tensor, with_tensors
from .trees import Args, Kwargs, Tree, tensors_of


def rows_by_rank(sent: Tensor, received: Tensor, _: int) -> tuple[list[int], list[int]]:
    """Read how many rows go to each rank, and how many come from it.

    Args:
        sent: (ranks, experts of a rank) rows of this rank for each expert.
        received: (ranks, experts of a rank) rows of each rank for the experts of this one.
    """
    to, come = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return to, come


def even_rows(sent: Tensor, _: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Stand for ``rows_by_rank`` where there is no data: each rank gets as many of the rows."""
    ranks = sent.shape[0]
    sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    return sizes, sizes


@dataclass(slots=True, eq=False)
class _Route:
    """Where the rows of one call go."""

    ranks: Ranks
    order: Tensor
    """Positions among (row, expert of it), sorted by expert."""
    experts_of_row: int
    to: list[int]
    """Rows for each rank."""
    come: list[int]
    """Rows from each."""

    def exchanged(self, rows: Tensor, *, back: bool) -> Tensor:
        """Send rows to the ranks of their experts, or results back."""
        to, come = (self.come, self.to) if back else (self.to, self.come)
        result = rows.new_empty((sum(come), *rows.shape[1:]))
        if self.ranks.group is not None:
            dist.all_to_all_single(result, rows.contiguous(), come, to, group=self.ranks.group)
        return result


class _Sent(torch.autograd.Function):
    """Rows, each to the ranks of its experts; or their weights, a row for each expert of a row.

    What backward needs is no activation: recomputation has not to run the exchanges for it.
    """

    @staticmethod
    def forward(ctx: Tree, values: Tensor, route: _Route, repeats: int) -> Tensor:
        ctx.route, ctx.repeats = route, repeats
        return route.exchanged(values[route.order // repeats], back=False)

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> tuple[Tensor, None, None]:
        route, repeats = ctx.route, ctx.repeats
        ordered = route.exchanged(grad, back=True)
        by_row = torch.empty_like(ordered)
        by_row[route.order] = ordered
        if repeats > 1:
            by_row = by_row.view(-1, repeats, *by_row.shape[1:]).sum(1)
        return by_row, None, None


class _Returned(torch.autograd.Function):
    """Results of experts, to the ranks of their rows, where those of a row are added up."""

    @staticmethod
    def forward(ctx: Tree, results: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        ordered = route.exchanged(results, back=True)
        by_row = torch.empty_like(ordered)
        by_row[route.order] = ordered
        return by_row.view(-1, route.experts_of_row, *by_row.shape[1:]).sum(1)

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        return route.exchanged(grad[route.order // route.experts_of_row], back=False), None


class RowsEdge(Protocol):
    """What ranks of tp and cp do with the rows of their samples."""

    def split(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return this rank's part of all tensors among arguments."""

    def wrapped(self, rows: Tensor) -> Tensor:
        """Take rows for this rank's part of those of all."""

    def left(self, rows: Tensor) -> Tensor:
        """Bring rows of all ranks into the layout in which they are left."""


class Experts:
    """Hooks of a module of experts."""

    def __init__(
        self,
        path: str,
        names: Sequence[str],
        number: int,
        ranks: Ranks,
        edges: Sequence[RowsEdge],
    ) -> None:
        """Keep what to exchange.

        Args:
            path: Of the module in the model.
            names: Of its parameters, of which this rank has a part along the first dim.
            number: Experts of all ranks.
            ranks: The ranks that share them.
            edges: Take this rank's part of the rows of samples that ranks of tp and cp have in
                common, the one over the inner axis first; others may come to them. None where its
                samples are its own.
        """
        self._edges = edges
        self._path = path
        self._names = tuple(names)
        self._number = number
        self._ranks = ranks
        self._own = number // ranks.size
        self._first = ranks.rank * self._own
        self._route: _Route | None = None

    def register(self, module: nn.Module) -> None:
        """Put the hooks on the module."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)
        module.register_forward_hook(self.uncover, always_call=True)

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Give the module the rows of its experts, and show their parameters."""
        self._cover(module)
        for edge in reversed(self._edges):
            args, kwargs = edge.split(args, kwargs)
        tensors = tensors_of((args, kwargs))
        rows, chosen, weights = self._roles(tensors)
        self._route, ids = self._routed(tensors[chosen])
        sent = _Sent.apply(tensors[rows], self._route, tensors[chosen].shape[1])  # type: ignore[no-untyped-call]
        weights_of_all = tensors[weights].reshape(-1, 1)
        shares = _Sent.apply(weights_of_all, self._route, 1)  # type: ignore[no-untyped-call]
        if not sent.shape[0]:  # the module runs on every rank, or their gradients would not meet
            sent, shares = (functional.pad(each, (0, 0, 0, 1)) for each in (sent, shares))
            ids = ids.new_full((1,), self._first)
        new = {rows: sent, chosen: ids[:, None], weights: shares}
        new_args, new_kwargs = with_tensors((args, kwargs), new)
        return new_args, new_kwargs

    def leave(self, _: nn.Module, __: Args, output: Tree) -> Tree:
        """Send the results back."""
        route = self._route
        assert route is not None
        results = first_tensor(output)[: sum(route.come)]
        whole = _Returned.apply(results, route)  # type: ignore[no-untyped-call]
        for edge in self._edges:
            whole = edge.wrapped(whole)
        for edge in reversed(self._edges):
            whole = edge.left(whole)
        return with_tensors(output, {0: whole})

    def _roles(self, tensors: Sequence[Tensor]) -> tuple[int, int, int]:
        """Positions of the rows, the experts of each, and their weights."""
        chosen = [i for i, each in enumerate(tensors) if not each.is_floating_point()]
        others = [i for i in range(len(tensors)) if i not in chosen]
        if len(chosen) == 1 and len(others) == 2:
            shape = tensors[chosen[0]].shape
            rows, weights = others if tensors[others[1]].shape == shape else others[::-1]
            if tensors[weights].shape == shape and tensors[rows].shape[0] == shape[0]:
                return rows, chosen[0], weights
        raise RankError(
            f"{self._path} is to take rows, the experts of each and their weights, not tensors of "
            + ", ".join(str(tuple(each.shape)) for each in tensors)
        )

    def _routed(self, chosen: Tensor) -> tuple[_Route, Tensor]:
        """Tell the other ranks how many rows come, and return the experts of those that do."""
        experts, order = torch.sort(chosen.reshape(-1), stable=True)
        counts = torch.zeros(self._number, dtype=torch.long, device=chosen.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.long))
        sent = counts.view(self._ranks.size, self._own)
        received = torch.empty_like(sent)
        if self._ranks.group is None:
            to, come = even_rows(sent, received, chosen.numel())
        else:
            dist.all_to_all_single(received, sent, group=self._ranks.group)
            to, come = rows_by_rank(sent, received, chosen.numel())
        own = torch.arange(self._first, self._first + self._own, device=chosen.device)
        ids = own.repeat(self._ranks.size).repeat_interleave(
            received.flatten(), output_size=sum(come)
        )
        route = _Route(self._ranks, order, chosen.shape[1], to, come)
        return route, ids.to(chosen.dtype)

    def _cover(self, module: nn.Module) -> None:
        """Show this rank's experts in the place of all."""
        for name in self._names:
            parameter: Tensor | None = module._parameters[name]
            assert parameter is not None
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            module.__dict__[name] = OwnExperts.of(local, self._first, self._number)

    def uncover(self, module: nn.Module, _: Args, __: Tree) -> None:
        """Leave the parameters as they were."""
        for name in self._names:
            module.__dict__.pop(name, None)
