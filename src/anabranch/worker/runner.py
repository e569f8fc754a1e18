"""One rank: applies a plan to its state, runs the model, samples, and reports what was drawn.

Owns the order of a step. Which objects it works with was decided in `assemble`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from anabranch.comm.debug import CollectiveTrace
from anabranch.core.plan import ReplicaPlan, ReplicaResult, StepPlan
from anabranch.kv.pool import Pool
from anabranch.models.decoder import Decoder
from anabranch.worker.inputs import InputMaker
from anabranch.worker.sampler import Sampler, result_of
from anabranch.worker.seats import Seats


@dataclass
class Worker:
    """Runs the steps of one rank. `step` returns a result on the rank that leads its replica."""

    rank: int
    replica: int
    leads: bool
    model: Decoder
    pool: Pool
    seats: Seats
    inputs: InputMaker
    sampler: Sampler
    refit: Callable[[Mapping[str, torch.Tensor]], None]
    trace: CollectiveTrace | None = None

    def control(self, name: str, payload: bytes) -> bytes:
        """Between steps. update_weights: payload is a safetensors file of whole checkpoint
        tensors, written in place, so that the views of every phase see them. ValueError leaves all
        as it was.
        """
        if name != "update_weights":
            raise ValueError(f"a worker's only control is update_weights, not {name!r}")
        try:
            tensors = safetensors.torch.load(payload)
        except SafetensorError as error:
            raise ValueError(f"update_weights: not a safetensors file: {error}") from error
        self.refit(tensors)
        return b""

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> ReplicaResult | None:
        mine = plan.replicas[self.replica]
        if self.trace is not None:
            self.trace.step = plan.number
        self.seats.apply(plan.number, mine)
        self.pool.copy_pages(mine.copies)
        if self.pool.poison:
            self.pool.poison_pages(self.seats.entered(mine, self.inputs.layout.stripes.page))
        if not any(r.rows for r in plan.replicas):
            return self._report(mine, None)
        step = self.inputs.make(plan, self.seats)
        rows = self.model(step, self.pool)
        return self._report(mine, self.model.logits(rows, step) if step.picked.total else None)

    def _report(self, plan: ReplicaPlan, logits: torch.Tensor | None) -> ReplicaResult | None:
        if logits is None or not len(logits):
            empty = np.zeros(0, np.int32)
            return ReplicaResult(empty, empty) if self.leads else None
        drawn = self.sampler.draw(plan, logits, self.seats)
        return result_of(plan, logits, drawn, self.seats) if self.leads else None
