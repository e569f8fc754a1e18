"""Tests that run side by side share the cores: one thread each, in the processes they start too."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded
