"""Settings of all tests; lies here so that this folder is on their import path, too."""

import os

from hypothesis import settings

# Machines that run tests are shared: a slow example is no failure.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

# Kernels of compiled blocks compute the same without vectors, and are built in two thirds of the
# time. torch reads it once, and processes that tests start have it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_collection_modifyitems(items):
    """Begin with what takes longest, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("run") is None)
