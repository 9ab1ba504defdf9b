"""Random draws of user code under a fixed seed."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SEED = 0
"""Seed of every generator while user code runs."""


@contextmanager
def fixed_seed() -> Iterator[Callable[[], bool]]:
    """Seed the generators of torch, Python and numpy, and give them back as they were.

    Yields:
        A function that tells whether Python's or numpy's generator has been used. Those of torch
        draw no data on the meta device.
    """
    numpy = sys.modules.get("numpy")
    before = random.getstate()
    numpy_before = numpy.random.get_state() if numpy else None

    def states() -> tuple[object, str]:
        return random.getstate(), repr(numpy.random.get_state()) if numpy else ""

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        random.seed(SEED)
        if numpy:
            numpy.random.seed(SEED)
        seeded = states()
        try:
            yield lambda: states() != seeded
        finally:
            random.setstate(before)
            if numpy:
                numpy.random.set_state(numpy_before)
