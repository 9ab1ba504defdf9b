"""The garbage collector stands still while tables grow."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Stop the garbage collector, which would scan growing tables over and over.

    What was made meanwhile joins the oldest generation without a scan: nearly all of it stays.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
