"""The brain: scheduler and crew, one step at a time.

Plan, run, apply in the caller's thread. Used by loop.py behind a channel, and by `LLM` directly.
Knows nothing of processes or sockets.
"""

import time
from collections.abc import Callable

from anabranch.core.messages import Output, Ready, Stats
from anabranch.core.request import FieldError, Request
from anabranch.core.resolve import RunConfig
from anabranch.engine.crew import Crew
from anabranch.engine.facts import describe_run, scheduler_config
from anabranch.sched import QueueFull, Scheduler


class Brain:
    """One model copy that can serve requests. clock: seconds, for deadlines."""

    def __init__(
        self, run: RunConfig, crew: Crew, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = Scheduler(scheduler_config(run))
        self._crew = crew
        self._clock = clock
        self.ready = Ready(run.arch.vocab, run.max_model_len, run.arch.eos_ids, describe_run(run))

    def submit(self, request: Request) -> list[Output]:
        """Queue a request; one that cannot be served is answered at once."""
        try:
            self._scheduler.submit(request, self._clock())
        except (FieldError, QueueFull) as error:
            return [Output(request.id, finish_reason="error", error=str(error))]
        return []

    def abort(self, request_id: str) -> list[Output]:
        return self._scheduler.abort(request_id)

    def step(self) -> list[Output]:
        """Plan as far ahead as allowed and apply one result; nothing to do gives no outputs."""
        outputs = self._scheduler.expire(self._clock())
        while (plan := self._scheduler.next_step()) is not None:
            self._crew.start(plan)
        if self._scheduler.in_flight:
            outputs += self._scheduler.apply(self._crew.result())
        return outputs

    def call(self, name: str, payload: bytes) -> tuple[list[bytes], list[Output]]:
        """A control verb on every rank, with no step under way; its replies, and outputs meanwhile.

        Weights that change make every cached prefix worthless. ValueError if the ranks refuse.
        """
        outputs: list[Output] = []
        while self._scheduler.in_flight:
            outputs += self._scheduler.apply(self._crew.result())
        if name == "update_weights":
            self._scheduler.forget_prefixes()
        return self._crew.call(name, payload), outputs

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    @property
    def patience(self) -> float | None:
        """Seconds until a deadline passes, or None."""
        deadline = self._scheduler.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def stats(self) -> Stats:
        return self._scheduler.stats()

    def close(self) -> None:
        self._crew.close()
