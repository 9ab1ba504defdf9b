"""What a model asks of known inputs is noted, and answered where they are not known."""

import pytest
import torch

from planner.checking.known_reads import NotedReads
from planner.runtime.known_data import PlannedReads

DATA = torch.tensor([[1, 2], [3, 4]])


def asked(ids):
    """All on one line: they are answered in turn."""
    return [
        3 in ids,
        9 in ids,
        torch.allclose(ids, ids),
        int(ids[0, 1]),
        ids[1].tolist(),
        1 in ids[0],
    ]


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_asked_of_inputs_is_answered_as_they_are(times):
    on_meta = DATA.to("meta")
    with NotedReads(on_meta, DATA, ()) as noted:
        assert asked(on_meta) == asked(DATA)
    with PlannedReads(noted.noted):
        for _ in range(times):
            assert asked(torch.empty_like(DATA, device="meta")) == asked(DATA)
