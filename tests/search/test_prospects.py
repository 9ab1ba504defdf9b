"""What is not priced could not have been among the best, and what is set aside is accounted for."""

import json
from dataclasses import replace

import pytest
from searches import request_for, search_for, space_for

from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import list_clusters, load_cluster
from planner.search.bounds import least_s
from planner.search.prospects import Prospect
from planner.search.space import LayoutSpace

MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 4096,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture") / "config.json"
    path.write_text(json.dumps(MIXTURE))
    return trace_family(load_model(str(path), seq_len=256), dtype="bfloat16")


def unit_seconds(priced):
    """Kernels and collectives of one microbatch through all units."""
    return sum(
        unit.forward_s + unit.backward_s + unit.forward_comm_s + unit.backward_comm_s
        for unit in priced.model.units
    )


def check_bounds(space: LayoutSpace) -> int:
    """Hold what bounds choices to the prices of those choices; how many are above zero."""
    legal, _ = space.legal()
    prospects = space.prospects(legal)
    work = space.pricer.least_work
    choices = [prospect.choice for prospect in prospects]
    bounds = {choice: work.by_larger_s(choice) for choice in choices}
    for prospect, choice in zip(prospects, choices, strict=True):
        while prospect.sharpen():
            pass
        for search in prospect.searches():
            whole_s = unit_seconds(search.priced)
            assert bounds[choice] <= whole_s, choice
            assert work.solved_s(choice) <= whole_s, choice
            own_s = search.once_s + least_s(
                search.configuration, parts_s=search.parts_s, transfers_s=search.transfers_s
            )
            assert prospect.bound_s <= own_s, choice
    return sum(bound > 0 for bound in bounds.values())


@pytest.mark.parametrize("name", list_clusters())
def test_no_microbatch_takes_less_than_larger_ones_tell(gpt, name):
    cluster = load_cluster(name, gpus=8)
    if "bfloat16" not in cluster.device.peak_flop_per_s:
        pytest.skip("the models of these tests are traced in bfloat16")
    assert check_bounds(space_for(gpt, cluster)) > 0


@pytest.mark.parametrize("batch", [8, 24, 60])
def test_bounds_hold_for_sizes_that_are_no_powers_of_two(gpt, batch):
    cluster = load_cluster("h100-sxm", gpus=4)
    space = LayoutSpace(gpt, cluster, request_for(cluster, batch=batch))
    assert check_bounds(space) > 0


def test_bounds_hold_for_experts_and_contexts(mixture, llama):
    assert check_bounds(space_for(mixture, load_cluster("h100-sxm", gpus=16), pp=1)) > 0
    assert check_bounds(space_for(llama, load_cluster("h100-sxm", gpus=8), cp=2)) > 0
    assert check_bounds(space_for(mixture, load_cluster("h100-sxm", gpus=8), cp=2, ep=4)) > 0


@pytest.mark.parametrize("fix", [{"pp": 1}, {"cp": 2}, {"tp": 2}])
@pytest.mark.parametrize("chunks", [2, 8])
@pytest.mark.parametrize("model", ["gpt", "llama", "mixture"])
def test_bounds_hold_for_a_loss_in_chunks(model, chunks, fix, request):
    """Beside a host that takes no time for an op, which is most of a small model's."""
    cluster = load_cluster("h100-sxm", gpus=8)
    device = replace(cluster.device, host_dispatch_s=0.0, split_dispatch_s=0.0)
    graphs = request.getfixturevalue(model)
    space = space_for(graphs, replace(cluster, device=device), loss_chunks=chunks, **fix)
    assert check_bounds(space) > 0


@pytest.mark.parametrize("fix", [{"loss_chunks": 4}, {"cp": 2}, {"tp": 2}])
@pytest.mark.parametrize("model", ["gpt", "llama", "mixture"])
def test_bounds_hold_where_the_host_runs_the_ops_itself(model, fix, request):
    """And takes longer for those on parts, which programs of layouts see."""
    cluster = load_cluster("h100-sxm", gpus=8)
    more = dict.fromkeys(("split_dispatch_s", "selective_dispatch_s", "full_dispatch_s"), 1e-4)
    device = replace(cluster.device, host_dispatch_s=0.0, **more)
    space = space_for(request.getfixturevalue(model), replace(cluster, device=device), **fix)
    assert check_bounds(space) > 0


def test_hosts_that_issue_slowly_bound_what_is_small(gpt):
    """As they issue as many kernels of small tensors as of large ones."""
    cluster = load_cluster("h100-sxm", gpus=8)
    slow = replace(cluster.device, host_dispatch_s=1e-4, split_dispatch_s=1e-3)
    space = space_for(gpt, replace(cluster, device=slow))
    work = space.pricer.least_work
    for prospect in space.prospects(space.legal()[0]):
        (unit_s,) = {unit_seconds(search.priced) for search in prospect.searches()} or {0.0}
        if not unit_s:
            continue
        issued_s = work.issued_s(prospect.choice)
        assert issued_s <= unit_s, prospect.choice
        if prospect.choice.ranks == 1:  # of split ones it is not known which ops run on parts
            assert issued_s > 0.5 * unit_s, prospect.choice
            assert issued_s > 10 * work.solved_s(prospect.choice)


@pytest.mark.parametrize("gpus", [4, 16])
@pytest.mark.parametrize("model", ["gpt", "llama", "mlp", "mixture"])
def test_the_same_is_found_as_where_all_is_priced(model, gpus, request, monkeypatch):
    graphs = request.getfixturevalue(model)
    cluster = load_cluster("h100-sxm", gpus=gpus)
    some = search_for(graphs, cluster)
    priced = []
    monkeypatch.setattr(Prospect, "sharpen", lambda prospect: priced.append(prospect))
    every = search_for(graphs, cluster)
    assert priced
    assert some.best.costs.step_time_s == pytest.approx(every.best.costs.step_time_s, rel=1e-9)
    assert some.solver.status == every.solver.status
    shown = [
        [each.costs.step_time_s for each in outcome.candidates[:5]] for outcome in (some, every)
    ]
    assert shown[0] == pytest.approx(shown[1], rel=1e-9)
    counts = [len(outcome.candidates) + len(outcome.rejections) for outcome in (some, every)]
    assert counts[0] >= counts[1]
