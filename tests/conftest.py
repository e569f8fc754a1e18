"""Tests that run side by side: one thread each, also in what they start; the longest first."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The matrix's samples come first: at the end, one worker would run them while others rest."""
    items.sort(key=lambda item: "test_matrix.py" not in item.nodeid)
