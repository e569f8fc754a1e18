"""The engine: process tree, the brain's loop, and the ways to talk to it.

Importing this room imports no torch; the process that runs a worker loads it by module path.
"""
