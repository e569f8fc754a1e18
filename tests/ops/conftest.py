"""What the ops' tests share: every provider of this machine, one at a time."""

from collections.abc import Callable

import pytest

from anabranch import ops
from anabranch.ops.cpu import provider as cpp

HERE = cpp.machine()
ISAS = () if HERE is None else HERE.runnable
PROVIDERS = ("reference", *(f"cpp-{isa}" for isa in ISAS))

Bind = Callable[[int], ops.Ops]


@pytest.fixture(params=PROVIDERS)
def bind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Binds the ops of one provider (and instruction set) for a number of threads."""
    name, _, isa = str(request.param).partition("-")
    if isa:
        monkeypatch.setenv(cpp.ISA_VARIABLE, isa)
    choice: ops.Choice = "cpp" if name == "cpp" else "reference"
    return lambda threads: ops.bind("cpu", provider=choice, threads=threads)


@pytest.fixture
def bound(bind: Bind) -> ops.Ops:
    """The ops of one provider, single-threaded."""
    return bind(1)
