"""Who carries out plans: the ranks of a model copy behind one object.

`LocalCrew` holds the ranks that live in this process: the first runs in the caller's thread (a
second Python thread beside a CPU worker costs dearly), others as threads. tree.py adds rank
processes. Knows workers by two methods and loads their maker by module path, so importing this
loads no torch.
"""

import threading
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from queue import SimpleQueue
from typing import Protocol, cast

from anabranch.core.plan import ReplicaResult, StepPlan, StepResult
from anabranch.core.resolve import RunConfig
from anabranch.engine.protocol import Endpoint


class RankWorker(Protocol):
    """One rank. `step` returns a result on the rank that leads its replica, None elsewhere."""

    def step(self, plan: StepPlan) -> ReplicaResult | None: ...

    def control(self, name: str, payload: bytes) -> bytes: ...


class Maker(Protocol):
    """Makes the workers of one process; made once per process as `Maker(run, path, endpoint)`."""

    def make(self, rank: int) -> RankWorker:
        """Called once per rank, from the thread that will run it; threads call in parallel."""
        ...

    def abort(self) -> None:
        """A rank failed: wake the others that wait for it."""
        ...


RANK_MAKER = "anabranch.engine.ranks:RankMaker"


class StepFailed(RuntimeError):
    """A step could not be carried out; the message names the step and the rank."""


class Crew(Protocol):
    """All ranks. Plans are started in order and their results taken in the same order."""

    def start(self, plan: StepPlan) -> None: ...

    def result(self) -> StepResult:
        """The result of the oldest plan started. StepFailed ends the engine."""
        ...

    def call(self, name: str, payload: bytes) -> list[bytes]:
        """Run a control verb on every rank; ValueError if the ranks refuse it."""
        ...

    def close(self) -> None: ...


def load_maker(maker: str, run: RunConfig, path: str, endpoint: Endpoint) -> Maker:
    """maker: "module:class". path: of the checkpoint."""
    module, _, name = maker.partition(":")
    return cast(Maker, getattr(import_module(module), name)(run, path, endpoint))


Order = StepPlan | tuple[str, bytes] | None
Reply = ReplicaResult | bytes | BaseException | None


def obey(worker: RankWorker, order: StepPlan | tuple[str, bytes]) -> ReplicaResult | bytes | None:
    """Carry out one order on one rank."""
    if isinstance(order, tuple):
        return worker.control(*order)
    return worker.step(order)


class _RankThread(threading.Thread):
    """A rank as a thread: orders in, replies out; ends at the order None."""

    def __init__(self, maker: Maker, rank: int) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank
        self.orders: SimpleQueue[Order] = SimpleQueue()
        self.replies: SimpleQueue[Reply] = SimpleQueue()
        self._maker = maker

    def run(self) -> None:
        try:
            worker = self._maker.make(self.rank)
            self.replies.put(None)
            while (order := self.orders.get()) is not None:
                self.replies.put(self._reply(worker, order))
        except BaseException as error:  # carried to the thread that asks, which raises it
            self._maker.abort()
            self.replies.put(error)

    def _reply(self, worker: RankWorker, order: StepPlan | tuple[str, bytes]) -> Reply:
        try:
            return obey(worker, order)
        except ValueError as error:
            if isinstance(order, tuple):  # a refused control leaves the rank as it was
                return error
            raise


class LocalCrew:
    """The ranks of this process, and so all of them unless tree.py adds more."""

    def __init__(self, run: RunConfig, path: str, maker: str, endpoint: Endpoint) -> None:
        self._maker = load_maker(maker, run, path, endpoint)
        self._plans: deque[StepPlan] = deque()
        first, *others = endpoint.ranks
        self._first = first
        self._threads = [_RankThread(self._maker, rank) for rank in others]
        for thread in self._threads:
            thread.start()
        try:
            self._worker = self._maker.make(first)
        except BaseException:
            self._maker.abort()
            raise
        for thread in self._threads:
            self._take(thread)

    def start(self, plan: StepPlan) -> None:
        for thread in self._threads:
            thread.orders.put(plan)
        self._plans.append(plan)

    def result(self) -> StepResult:
        number, parts = self.parts()
        return StepResult(number, tuple(part for part in parts if part is not None))

    def parts(self) -> tuple[int, list[ReplicaResult | None]]:
        """Run the oldest plan: its number, and what each rank of this process returned."""
        plan = self._plans.popleft()
        rows = [part.rows for part in plan.replicas]
        try:
            replies = self._all(plan)
        except Exception as error:
            raise StepFailed(f"step {plan.number} (rows {rows}): {describe(error)}") from error
        assert all(r is None or isinstance(r, ReplicaResult) for r in replies), "a step's reply"
        return plan.number, cast(list[ReplicaResult | None], replies)

    def call(self, name: str, payload: bytes) -> list[bytes]:
        assert not self._plans, "controls run between steps"
        for thread in self._threads:
            thread.orders.put((name, payload))
        return cast(list[bytes], self._all((name, payload)))

    def close(self) -> None:
        for thread in self._threads:
            thread.orders.put(None)
        for thread in self._threads:
            thread.join(10)

    def _all(self, order: StepPlan | tuple[str, bytes]) -> Sequence[Reply]:
        """The first rank's reply and the threads', in rank order."""
        errors: list[BaseException] = []
        replies: list[Reply] = []
        try:
            replies.append(obey(self._worker, order))
        except BaseException as error:
            refused = isinstance(error, ValueError) and isinstance(order, tuple)
            if not refused:
                self._maker.abort()
            errors.append(error)
        for thread in self._threads:
            try:
                replies.append(self._take(thread))
            except BaseException as error:
                errors.append(error)
        if errors:
            raise _cause(errors)
        return replies

    def _take(self, thread: _RankThread) -> Reply:
        reply = thread.replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply


def _cause(errors: list[BaseException]) -> BaseException:
    """Of several ranks' errors the one that caused the rest: others only missed a peer."""
    return next((e for e in errors if type(e).__name__ != "CommError"), errors[0])


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
