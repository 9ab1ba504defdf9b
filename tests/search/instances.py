"""Small models, clusters and configurations, and their best step by enumeration."""

from dataclasses import replace
from itertools import combinations, pairwise, product
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from planner.cost.held_stage import HeldStage
from planner.cost.model_units import ModelUnits, TiedWeight
from planner.cost.shared_cores import times_of
from planner.cost.stage_costs import StageCosts
from planner.cost.unit_pricing import PricedUnit, Recompute
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.graph.analysis.shared import SharedActivation
from planner.hardware.profiles import load_cluster
from planner.search.column_maker import ColumnMaker
from planner.search.columns import KnownMixes
from planner.search.configuration_search import REACH_UNITS, ConfigurationSearch
from planner.search.decide import Decision
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.schedules import schedule_rule
from planner.vocabulary import RECOMPUTATIONS, SHARED_SCHEDULES, ZERO_BUBBLE_SCHEDULES

FRAMEWORK = load_framework(SCRIPT)
MIB = 2**20


CASES = (
    (1, 2, 8), (2, 1, 2), (2, 2, 4), (2, 1, 2048), (4, 2, 4), (4, 1, 8), (1, 8, 1), (1, 8, 4)
)  # fmt: skip
"""pp, tp, microbatches; where one rank has all of the state, it is also planned as plain."""
OFFLOADED = CASES[0], CASES[2]
"""Those that are planned with states in host memory, too."""
STAGES = {"1F1B": 1, "GPipe": 1, **dict.fromkeys(SHARED_SCHEDULES, 2)}
"""Stages of a rank."""


@st.composite
def units(draw, name, *, has_kinds, master):
    forward = draw(st.floats(1e-3, 8e-3))
    kept = draw(st.integers(50, 600)) * MIB
    selective = draw(st.floats(0.2, 0.9))
    full = draw(st.floats(0.02, 0.2))
    again = draw(st.sampled_from([0.0, 0.1, 0.4])) * forward
    shares = {"none": 1.0, "selective": selective, "full": full}
    times = {"none": 0.0, "selective": again, "full": forward}
    parameters = draw(st.integers(10, 400)) * MIB
    temporary = {k: draw(st.integers(1, 200)) * MIB for k in RECOMPUTATIONS}
    gradients = draw(st.integers(0, parameters // 2))
    return PricedUnit(
        structure=name,
        forward_s=forward,
        backward_s=forward * draw(st.floats(1.2, 2.5)),
        weight_backward_s=forward,
        forward_comm_s=draw(st.sampled_from([0.0, 1e-3])),
        backward_comm_s=draw(st.sampled_from([0.0, 1e-3])),
        recompute={k: Recompute(compute_s=times[k], comm_s=0.0) for k in RECOMPUTATIONS},
        activation_bytes={k: round(kept * (shares[k] if has_kinds else 1)) for k in RECOMPUTATIONS},
        temporary_bytes=temporary,
        gradient_temporary_bytes={k: size + gradients for k, size in temporary.items()},
        added_temporary_bytes={k: size + gradients // 2 for k, size in temporary.items()},
        trained_bytes=parameters,
        gathered_bytes=parameters // master,
        summed_gradient_bytes=0,
        waiting_gradient_bytes=draw(st.integers(1, 300)) * MIB,
        released_bytes=kept // 3 if name == "epilogue" else 0,
        pinned_bytes=draw(st.sampled_from([0, 100, 1000])) * MIB * has_kinds,
    )


@st.composite
def models(draw, *, always_alike=False):
    blocks = draw(st.integers(2, 5))
    alike = always_alike or draw(st.booleans())
    master = draw(st.sampled_from([1, 2]))  # bytes of the optimiser's dtype for each computed in
    block = draw(units("block", has_kinds=True, master=master))
    kinds_of = draw(st.sampled_from([lambda i: i % 2, lambda i: 2 * i // blocks, lambda i: i]))
    inner = [
        block if alike else draw(units(f"block{kinds_of(i)}", has_kinds=True, master=master))
        for i in range(blocks)
    ]
    if not alike:
        by_name = {unit.structure: unit for unit in inner}
        inner = [by_name[unit.structure] for unit in inner]
    ends = [draw(units(name, has_kinds=False, master=master)) for name in ("prologue", "epilogue")]
    count = blocks + 2
    sent = draw(st.integers(1, 64)) * MIB
    entering = [0] + [sent if alike else draw(st.integers(0, 64)) * MIB for _ in range(count - 1)]
    every = [ends[0], *inner, ends[1]]
    readers = draw(st.sampled_from([(), (0, count - 1), (0, 1, count - 1), range(1, count - 1)]))
    size = min((every[reader].trained_bytes for reader in readers), default=0)
    weight = TiedWeight(units=tuple(readers), trained_bytes=size, gathered_bytes=size // master)
    tied = (weight,) if readers else ()
    # What several units read lies outside of all blocks.
    sizes = {"outer_trained_bytes": size, "outer_gathered_bytes": size // master}
    readers_of = {id(every[i]): replace(every[i], **sizes) for i in readers if 0 < i < count - 1}
    every = [
        readers_of[id(unit)] if index in readers and 0 < index < count - 1 else unit
        for index, unit in enumerate(every)
    ]
    shared = ()
    if draw(st.booleans()):
        shared = (
            SharedActivation(
                storage=0,
                size_bytes=draw(st.integers(1, 100)) * MIB,
                units=frozenset(range(2, count - 1)),
                owners=frozenset({1}),
            ),
        )
    handing = draw(st.sets(st.integers(0, count - 2)))
    shared += tuple(
        SharedActivation(
            storage=1 + index,
            size_bytes=min(every[index + 1].activation_bytes.values()),
            units=frozenset({index}),
            owners=frozenset({index + 1}),
            received=frozenset({index + 1}),
            handed=frozenset({index}),
        )
        for index in sorted(handing)
    )
    buffer_bytes = draw(st.sampled_from([0, 300])) * MIB
    input_bytes = draw(st.sampled_from([0, 0, 50, 400])) * MIB
    model = model_units(tuple(every), tuple(entering), tied, shared, buffer_bytes)
    keepers = draw(st.sampled_from([(), (0,), (count - 1,), range(1, count - 1)]))
    return replace(model, held_by_code=((input_bytes, frozenset(keepers)),))


def model_units(all_units, entering, tied, shared, buffer_bytes=0):
    return ModelUnits(
        buffer_bytes=buffer_bytes,
        units=all_units,
        entering_bytes=entering,
        tied=tied,
        shared=shared,
        received_bytes=tuple(
            received(sent, unit, at in (0, len(all_units) - 1))
            for at, (sent, unit) in enumerate(zip(entering, all_units, strict=True))
        ),
        matmul_flop=(1,) * len(all_units),
    )


def received(sent, unit, is_end):
    """What a unit counts of what it is sent: what a block recomputes, it may not have kept."""
    kept = [unit.activation_bytes[kind] for kind in RECOMPUTATIONS]
    least = min(sent, *kept)
    return (least,) * len(kept) if is_end or sent // MIB % 2 else (0, least, least)


def heavier(model, by):
    """The same units with more parameters beside what they keep."""
    units = tuple(
        replace(
            unit, trained_bytes=by * unit.trained_bytes, gathered_bytes=by * unit.gathered_bytes
        )
        for unit in model.units
    )
    return replace(model, units=units)


@st.composite
def clusters(draw):
    """One to three levels of links, each 0.01 to 1 times as fast as the shipped one."""
    cluster = load_cluster("h100-sxm", gpus=16)
    inside, between = cluster.links
    ranks = draw(st.sampled_from([(), (2,), (4,), (2, 4), (3,), (5,)]))
    levels = [replace(inside, ranks=number) for number in ranks] + [replace(between, ranks=None)]
    links = []
    for level in levels:
        factor = draw(st.sampled_from([0.01, 0.05, 0.3, 1.0]))
        speed = level.bandwidth_bytes_per_s * factor
        links.append(replace(level, bandwidth_bytes_per_s=speed))
    memory_bytes = draw(st.integers(2, 24)) * 1024 * MIB
    device = replace(
        cluster.device,
        memory_bytes=memory_bytes + 4 * 1024 * MIB,
        allocator_share=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    return replace(
        cluster,
        host=replace(cluster.host, memory_bytes=draw(st.sampled_from([1, 2, 8])) * 1024 * MIB),
        num_gpus=8, gpus_per_node=ranks[-1] if ranks else 8, links=tuple(links),
        device=device,
    )  # fmt: skip


RANKS_PER_CORE = st.sampled_from([1.0, 1.0, 1.4, 2.0, 8.0])


def configurations(model, ranks_per_core=1.0):
    """Several degrees and schedules, a few and thousands of microbatches.

    The ranks of a pipeline share cores, as many each.
    """
    for pp, tp, microbatches in CASES:
        for schedule, virtual_stages in [("none", 1)] if pp == 1 else STAGES.items():
            stages = pp * virtual_stages
            if stages > len(model.units) or schedule_rule(
                schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=microbatches
            ):
                continue
            if schedule == "GPipe" and microbatches > 100:
                continue
            found = Configuration(
                degrees=ParallelDegrees(pp=pp, tp=tp, dp_shard=8 // (pp * tp)),
                schedule=schedule,
                virtual_stages=virtual_stages,
                microbatch_size=1,
                num_microbatches=microbatches,
                reshard_after_forward=(pp == 1 or pp * tp == 4)
                and schedule not in ZERO_BUBBLE_SCHEDULES,
                sequence_parallel=False,
                ranks_per_core=ranks_per_core if pp > 1 else 1.0,
            )
            yield found
            if (pp, tp, microbatches) in OFFLOADED and virtual_stages == 1:
                yield replace(found, cpu_offload=True, reshard_after_forward=pp == 1)
                if pp == 1:
                    yield replace(found, activation_offload=True)
            if found.degrees.shards == 1:
                yield replace(found, state_form="plain", reshard_after_forward=False)


def search_of(model, configuration, cluster, between=()):
    cuts = [SimpleNamespace(after_unit=i) for i in range(len(model.units) - 1)]
    priced = SimpleNamespace(model=model, graph=SimpleNamespace(cuts=cuts), solutions={})
    costs = StageCosts(model, configuration, cluster, FRAMEWORK, between=between)
    maker = ColumnMaker(costs, kinds=kinds_of(configuration), known=KnownMixes())
    return ConfigurationSearch(configuration, priced, costs, maker)


def kinds_of(configuration):
    return ("none",) if configuration.divides_backward else RECOMPUTATIONS


def all_kinds(configuration, first, end, last):
    """Recomputations of a stage: any for each block, or one for all on a shared rank."""
    blocks = [i for i in range(first, end) if 0 < i < last]
    if configuration.virtual_stages > 1:
        choices = [(kind,) * len(blocks) for kind in kinds_of(configuration)]
    else:
        choices = product(RECOMPUTATIONS, repeat=len(blocks))
    for choice in choices:
        kinds = dict(zip(blocks, choice, strict=True))
        yield tuple(kinds.get(i, "none") for i in range(first, end))


def check(searches):
    """Hold the decision among some configurations to enumeration of each."""
    least = {id(search): enumerated_s(search) for search in searches}
    for search in searches:
        assert search.bound_s <= least[id(search)] * (1 + 1e-9), search.configuration
    decision = Decision(searches, top=3, time_limit_s=None)
    report = decision.decide()
    best = min(least.values())
    if best == float("inf"):
        assert not decision.incumbents.solved
        return
    assert report.objective_s == pytest.approx(best, rel=1e-6)
    assert report.status == "optimal"
    assert report.bound_s <= best * (1 + 1e-6)
    for search in searches:
        assert min(search.bound_s, report.objective_s) <= least[id(search)] * (1 + 1e-6)


def enumerated_s(search):
    """Least step over all cuts and recomputations, priced and sized stage by stage."""
    configuration, table = search.configuration, search.table
    count, stages = len(table.units), configuration.num_stages
    seconds = [table.total("least", i, i + 1) for i in range(count)]
    even_s, longest_s = sum(seconds) / stages, max(seconds)
    best = float("inf")
    for inner in combinations(range(1, count), stages - 1):
        cuts = (0, *inner, count)
        runs = list(pairwise(cuts))
        if configuration.virtual_stages > 1 and any(
            abs(sum(seconds[a:b]) - even_s) > REACH_UNITS * longest_s * (1 + 1e-9) for a, b in runs
        ):
            continue
        best = min(best, best_of_cut(configuration, search.costs, runs))
    return best


def best_of_cut(configuration, costs, runs):
    """Ranks do not compete with each other, so that each takes its own best where stages are
    alone; where they share a rank, all of its stages' choices are tried together."""
    options, pp = [], configuration.degrees.pp
    for rank in range(pp):
        mine, of_rank = configuration.stages_of(rank), costs.of_stage(rank)
        options.append(fastest_that_fit(configuration, of_rank, rank, [runs[s] for s in mine]))
        if not options[-1]:
            return float("inf")
    best = float("inf")
    for choice in product(*options):
        seconds = [choice[configuration.rank_of(s)][s // pp] for s in range(len(runs))]
        times = times_of(
            configuration,
            forward_s=[each.forward_s for each in seconds],
            backward_s=[each.backward_s for each in seconds],
            weight_backward_s=[
                each.weight_backward_s * configuration.divides_backward for each in seconds
            ],
        )
        once_s = max(
            sum(seconds[s].step_s for s in configuration.stages_of(rank)) for rank in range(pp)
        )
        best = min(best, times.step_s + once_s)
    return best


def fastest_that_fit(configuration, costs, rank, runs):
    """Seconds of a rank's stages under all recomputations that fit, without those that are no
    faster in any stage than another."""
    last, stages = len(costs.units) - 1, configuration.stages_of(rank)
    moments = configuration.fullest_moments(rank)

    def seconds(kinds):
        return [
            costs.seconds(*run, each, stage=stage)
            for stage, run, each in zip(stages, runs, kinds, strict=True)
        ]

    def fits(kinds):
        on_host = sum(costs.memory.host_bytes(*run) for run in runs)
        offloads = configuration.cpu_offload or configuration.activation_offload
        if offloads and on_host > costs.cluster.host.memory_bytes:
            return False
        return all(
            costs.memory.peak(
                [
                    HeldStage(first=a, end=b, kinds=each, moment=at)
                    for (a, b), each, at in zip(runs, kinds, moment, strict=True)
                ]
            ).total_bytes
            <= costs.device.memory_bytes
            for moment in moments
        )

    options = [
        (seconds(kinds), kinds)
        for kinds in product(*(all_kinds(configuration, *run, last) for run in runs))
    ]
    kept = []
    for option, kinds in sorted(options, key=lambda o: sum(each.backward_s for each in o[0])):
        is_needless = any(
            all(
                a.backward_s <= b.backward_s and a.step_s <= b.step_s
                for a, b in zip(other, option, strict=True)
            )
            for other in kept
        )
        if not is_needless and fits(kinds):
            kept.append(option)
    return kept
