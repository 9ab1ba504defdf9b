"""Functions of torch that read a number: none is unknown where data are not there."""

import warnings

import torch
from torch.overrides import get_testing_overrides

from planner.runtime.answers import NUMBER_READS

NEVER_ASKED = {"__long__", "__nonzero__", "is_set_to"}
"""Of Python 2, and of memory instead of data."""
NO_ANSWER = {"__complex__"}
"""Answers are real numbers."""

ARGUMENTS = (
    lambda device: [torch.ones(1, device=device)],
    lambda device: [torch.ones(1, dtype=torch.bool, device=device)],
    lambda device: [torch.ones(2, device=device), torch.ones(2, device=device)],
    lambda device: [torch.ones(2, device=device), 1.0],
)


def needs_data(function, arguments):
    """Whether it gives a number of tensors with data, and raises without."""
    try:
        if not isinstance(function(*arguments("cpu")), bool | int | float | complex):
            return False
    except Exception:  # other arguments are meant
        return False
    try:
        function(*arguments("meta"))
    except RuntimeError:
        return True
    return False


def test_every_function_that_reads_a_number_has_its_type():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated functions
        found = {
            function.__name__
            for function in get_testing_overrides()
            if any(needs_data(function, arguments) for arguments in ARGUMENTS)
        }
    symbolic = {name for name in found if name.lstrip("_").startswith("sym_")}  # not of tensors
    assert {"item", "equal", "__contains__"} <= found
    assert found - symbolic - NEVER_ASKED - NO_ANSWER - {"item"} <= NUMBER_READS.keys()
