"""Ranks of a cell as processes, over shared memory or gloo: a parent drives, children step.

A child sends back, with each step's result, the logits it drew from and the collectives it made, so
that a trial looks the same over threads and over processes.
"""

import faulthandler
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from tests.comm.ranks import CONTEXT, InheritedFd, text_with
from tests.layouts import SharpReader
from tests.matrix.book import Recorder
from tests.matrix.traces import Trace

from anabranch.comm.endpoint import make_endpoint
from anabranch.comm.worlds import open_world
from anabranch.core.plan import StepPlan, StepResult
from anabranch.core.resolve import RunConfig
from anabranch.weights.share import Alone
from anabranch.worker.assemble import build

LIMIT = 120.0
"""Seconds a rank may take for one step or for its start, before it dumps its stacks and ends."""


def _child(pipe: Connection, text: str, fd: int, run: RunConfig, rank: int, seed: int) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    world = open_world(text_with(text, fd), rank, run.layout.mesh.world, LIMIT / 2)
    trace, recorder = Trace(), Recorder()
    try:
        worker = build(run, rank, SharpReader(seed), Alone(), world, trace)
        worker.sampler = recorder
        pipe.send(None)
        while (plan := pipe.recv()) is not None:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            result = worker.step(plan)
            pipe.send((result, recorder.seen, dict(trace.entries)))
            recorder.seen.clear()
            trace.entries.clear()
    except Exception as error:
        world.abort()
        pipe.send(error)
    faulthandler.cancel_dump_traceback_later()


class ProcessRanks:
    """P processes of one model copy; what they draw and call arrives in recorders and traces."""

    def __init__(
        self, run: RunConfig, seed: int, kind: str, recorders: Sequence[Recorder],
        traces: Sequence[Trace],
    ) -> None:  # fmt: skip
        self.recorders, self.traces = recorders, traces
        self.processes, self.pipes = [], []
        endpoint = make_endpoint(kind)
        (fd,) = endpoint.fds
        for rank in range(run.layout.mesh.world):
            mine, theirs = CONTEXT.Pipe()
            args = (theirs, endpoint.text, InheritedFd(fd), run, rank, seed)
            process = CONTEXT.Process(target=_child, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
        endpoint.close()
        self._receive()

    def _receive(self) -> list[object]:
        """One message of every rank; the first error, if there is one, is raised."""
        found: list[object] = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(LIMIT + 10):
                raise TimeoutError(f"rank {rank} does not answer")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} ended") from None
        errors = [e for e in found if isinstance(e, Exception)]
        if errors:
            raise next((e for e in errors if "peer" not in str(e)), errors[0])
        return found

    def step(self, plan: StepPlan) -> StepResult:
        for pipe in self.pipes:
            pipe.send(plan)
        results = []
        for rank, answer in enumerate(self._receive()):
            assert isinstance(answer, tuple)
            result, seen, entries = answer
            self.recorders[rank].seen.update(seen)
            for members, calls in entries.items():
                self.traces[rank].entries[members] += calls
            if result is not None:
                results.append(result)
        return StepResult(plan.number, tuple(results))

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:  # the rank has ended
                continue
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()
