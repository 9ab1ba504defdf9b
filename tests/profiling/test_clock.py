"""What a call returns is kept while it is timed, as a training step keeps it for its backward."""

import itertools
import time

import torch

from planner.profiling.clock import KEPT_BYTES, Clock


def test_results_lie_in_other_memory(monkeypatch):
    moments_s = itertools.count(step=1e-3)
    monkeypatch.setattr("planner.profiling.clock.time.thread_time", lambda: next(moments_s))
    places = []
    operand = torch.ones(2**18)

    def call():
        result = operand + 1
        places.append(result.data_ptr())
        return result

    Clock(torch.device("cpu")).time_call(call, limit_s=0.5)
    in_a_row = KEPT_BYTES // operand.nbytes
    assert len(places) > 10 * in_a_row
    assert all(
        len(set(places[start : start + in_a_row])) == in_a_row
        for start in range(1, len(places) - in_a_row)
    )


def test_the_wait_is_not_counted():
    spread = Clock(torch.device("cpu")).time_call(lambda: time.sleep(0.002), limit_s=0.01)
    assert spread.median_s < 0.001
