"""Configurations are looked at lowest bound first; a bound that rises puts them off."""

from dataclasses import dataclass, replace

from searches import space_for

from planner.hardware.profiles import load_cluster
from planner.search.incumbents import Incumbents
from planner.search.partition import Partitions
from planner.search.visits import LowestFirst, Visits


@dataclass(frozen=True)
class Bounded:
    bound_s: float


def test_the_lowest_bound_comes_first_among_what_is_added_on_the_way():
    queue = LowestFirst([Bounded(3.0), Bounded(1.0)])
    found = []
    for each in queue:
        found.append((each.bound_s, queue.next_s))
        if each.bound_s == 1.0:
            queue.add([Bounded(2.0)])
    assert found == [(1.0, 3.0), (2.0, 3.0), (3.0, float("inf"))]


def test_none_is_cut_before_one_whose_bound_is_lower(big_gpt, monkeypatch):
    cluster = load_cluster("h100-sxm", gpus=16)
    small = replace(cluster.device, memory_bytes=cluster.device.memory_bytes / 4)
    space = space_for(big_gpt, replace(cluster, device=small))
    begun, bounds_s, best = [], [], Partitions.best

    def noted(partitions, best_s):
        bounds_s.append(partitions._search.bound_s)
        return best(partitions, best_s)

    def counted(partitions, search, limit_s, begin=Partitions.__init__):
        begun.append(search)
        begin(partitions, search, limit_s)

    monkeypatch.setattr(Partitions, "best", noted)
    monkeypatch.setattr(Partitions, "__init__", counted)
    Visits(Incumbents(5)).look_at(space.prospects(space.legal()[0]))
    assert bounds_s == sorted(bounds_s)
    assert 10 < len(bounds_s) < len(begun)
