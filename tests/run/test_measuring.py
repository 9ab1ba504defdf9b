"""Ranks of a measurement meet in every job, whatever their number."""

import json

import pytest
from driver import run_ranks
from measuring_rank import measure_between_ranks

pytestmark = pytest.mark.run


@pytest.mark.parametrize(
    ("per_node", "nodes", "kinds"),
    [
        (1, 1, set()),
        (2, 1, {"collective", "work", "pipeline"}),
        (3, 1, {"collective", "work", "pipeline"}),
        (1, 3, {"collective", "work", "pipeline"}),
    ],
)
def test_every_number_of_ranks_is_measured(per_node, nodes, kinds, tmp_path):
    run_ranks(measure_between_ranks, str(tmp_path), per_node, num_processes=per_node * nodes)
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == kinds
    if "pipeline" in kinds:
        assert found["pipeline"]["stages"] == (2 if per_node == 2 else 3)
        assert found["pipeline"]["seconds"] > 0
