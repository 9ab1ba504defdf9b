"""Ops of a CPU are timed on operands that they have not just read, but for products."""

import torch

from planner.profiling.kernels import Capture, in_turn, tensors_in


def captured(function, *operands):
    with Capture() as seen:
        function(*operands)
    (call,) = seen.calls
    return call


def places_and_results(function, *operands, times=8):
    places, results = [], []
    call = captured(function, *operands)

    class Places(Capture):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            places.append(tuple(tensor.data_ptr() for tensor in tensors_in(args)))
            assert [t.stride() for t in tensors_in(args)] == [t.stride() for t in operands]
            return op(*args, **(kwargs or {}))

    run = in_turn(call)
    with Places():
        results = [run() for _ in range(times)]
    return places, results


def test_pointwise_ops_read_other_memory_each_time():
    left, right = torch.randn(64, 32), torch.randn(32, 64).t()
    places, results = places_and_results(torch.add, left, right)
    assert len(set(places)) == len(places)
    assert all(torch.equal(result, left + right) for result in results)


def test_what_is_expanded_stays_where_it_is():
    left, right = torch.randn(64, 32), torch.randn(32).expand(64, 32)
    places, results = places_and_results(torch.add, left, right)
    assert {second for _, second in places} == {right.data_ptr()}
    assert all(torch.equal(result, left + right) for result in results)


def test_products_read_the_same_memory():
    places, _ = places_and_results(torch.mm, torch.randn(8, 8), torch.randn(8, 8))
    assert len(set(places)) == 1
