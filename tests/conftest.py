"""Tests that run side by side: one thread each, also in what they start; the longest first."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The matrix's samples come first: at the end, one worker would run them while others rest.

    Tests of the compiled ops are left out where no compiler works; where one does they run, and
    fail if the build left the ops out.
    """
    from tests.ops.providers import ISAS, compiles  # loads torch

    items.sort(key=lambda item: "test_matrix.py" not in item.nodeid)
    if ISAS or compiles():
        return
    out = [item for item in items if item.get_closest_marker("compiled")]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
