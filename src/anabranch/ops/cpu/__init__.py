"""The compiled CPU provider: kernels (C++), their binding, and the Python that calls it."""
