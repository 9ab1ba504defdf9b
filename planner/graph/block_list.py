"""Which list of modules holds the blocks, judged by parameters alone, before any trace."""

from collections.abc import Sequence

from torch import nn


def imbalance(parts: Sequence[int]) -> int:
    """Measure how unevenly a whole is cut into parts: the sum of their squares.

    Of all lists of blocks the one that cuts the model into the most even pieces is the best, and
    the sum of squares falls with every further even cut.
    """
    return sum(part * part for part in parts)


def heaviest_list(model: nn.Module) -> nn.Module | None:
    """Return the module list that splits the model's parameters most evenly, None without one."""
    total = sum(parameter.numel() for parameter in model.parameters())
    best: nn.Module | None = None
    least = imbalance([total])
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        parts = [sum(each.numel() for each in child.parameters()) for child in module.children()]
        cost = imbalance([*parts, max(total - sum(parts), 0)])
        if cost < least:
            best, least = module, cost
    return best
