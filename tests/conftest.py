"""Settings of all tests; lies here so that this folder is on their import path, too."""

import gc

import pytest
from hypothesis import settings

# Machines that run tests are shared: a slow example is no failure.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_collection_modifyitems(items):
    """Begin with what takes longest, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("run") is None)


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_looked_through_again():
    """Let the garbage collector pass over thousands of collected tests and what others cached."""
    gc.collect()
    gc.freeze()
