"""Collectives over shared memory in C++; `transports.shm` is their only caller."""
