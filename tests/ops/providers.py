"""Every provider of this machine, for the ops' tests to run with, one at a time."""

import os
import subprocess
from collections.abc import Callable

import pytest

from anabranch import ops
from anabranch.ops.cpu import provider as cpp

HERE = cpp.machine()
ISAS = () if HERE is None else HERE.runnable
PROVIDERS = ("reference", *(f"cpp-{isa}" for isa in ISAS))


def compiles() -> bool:
    """Whether there is a C++ compiler that works, by the name that builds use."""
    command = [os.environ.get("CXX", "c++"), "-x", "c++", "-fsyntax-only", "-"]
    try:
        return subprocess.run(command, input=b"int x;", timeout=30, check=False).returncode == 0
    except OSError:
        return False


Bind = Callable[[int], ops.Ops]


def binder(provider: str, monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Binds the ops of one of PROVIDERS for a number of threads."""
    name, _, isa = provider.partition("-")
    if isa:
        monkeypatch.setenv(cpp.ISA_VARIABLE, isa)
    choice: ops.Choice = "cpp" if name == "cpp" else "reference"
    return lambda threads: ops.bind("cpu", provider=choice, threads=threads)
