"""How long the scheduler takes to plan a step and to apply its result (no model, one thread).

Prints one JSON line per batch size: medians in milliseconds. Wanted: planning <= 0.2 ms at 128
rows, <= 2 ms at 4096.
"""

import json
import time
from statistics import median

import numpy as np

from anabranch.core.plan import ReplicaResult, StepPlan, StepResult
from anabranch.core.request import Request, SamplingParams
from anabranch.sched import Scheduler, SchedulerConfig


def result_of(plan: StepPlan) -> StepResult:
    parts = []
    for part in plan.replicas:
        seats = np.concatenate(
            [c.seat[c.sample == 1] for c in (part.prefill, part.decode)], dtype=np.int32
        )
        parts.append(ReplicaResult(seats, np.ones(len(seats), np.int32)))
    return StepResult(plan.number, tuple(parts))


def measure(rows: int, replicas: int, steps: int = 300) -> dict[str, float]:
    per = rows // replicas
    config = SchedulerConfig(
        pages=per * 8, replicas=replicas, max_running=per, max_waiting=rows, prefill_rows=8192
    )
    scheduler = Scheduler(config)
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = tuple(int(t) for t in rng.integers(0, 1000, int(rng.integers(8, 72))))
        scheduler.submit(Request(f"{i}", prompt, SamplingParams(max_tokens=400, seed=i)))
    planning, applying = [], []
    while len(planning) < steps:
        begin = time.perf_counter()
        plan = scheduler.next_step()
        middle = time.perf_counter()
        assert plan is not None
        result = result_of(plan)
        then = time.perf_counter()
        scheduler.apply(result)
        if all(part.prefill.rows == 0 for part in plan.replicas):
            planning.append((middle - begin) * 1e3)
            applying.append((time.perf_counter() - then) * 1e3)
    return {
        "rows": rows,
        "replicas": replicas,
        "plan_ms": round(median(planning), 3),
        "plan_p99_ms": round(sorted(planning)[int(0.99 * steps)], 3),
        "apply_ms": round(median(applying), 3),
    }


if __name__ == "__main__":
    for rows, replicas in ((8, 1), (128, 1), (128, 4), (1024, 1), (4096, 1), (4096, 4)):
        print(json.dumps(measure(rows, replicas)), flush=True)
