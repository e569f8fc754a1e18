"""The matrix: every cell that `core.resolve` accepts, run on thread ranks against one process."""
