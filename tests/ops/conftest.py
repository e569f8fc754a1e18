"""Fixtures of the ops' tests."""

import pytest
from tests.ops.providers import PROVIDERS, Bind, binder

from anabranch import ops


@pytest.fixture(params=PROVIDERS)
def bind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Binds the ops of each provider (and instruction set) for a number of threads."""
    return binder(str(request.param), monkeypatch)


@pytest.fixture
def bound(bind: Bind) -> ops.Ops:
    """The ops of each provider, single-threaded."""
    return bind(1)
