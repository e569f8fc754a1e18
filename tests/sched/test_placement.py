"""Placement over replicas: balance of a burst, hits of a chat, rows on some replicas only."""

import numpy as np
import pytest
from fake_worker import Driver, alone
from test_scheduler import prompt_of, request

from anabranch.sched import SchedulerConfig
from anabranch.sched.policy import Candidate, place


def config_of(replicas: int) -> SchedulerConfig:
    return SchedulerConfig(
        pages=2000, replicas=replicas, page_size=16, prefill_rows=256, max_model_len=20000
    )


@pytest.mark.parametrize("seed", range(5))
def test_burst_is_balanced(seed: int) -> None:
    """64 mixed prompts at once on dp 4: max/mean assigned tokens <= 1.3."""
    rng = np.random.default_rng(seed)
    driver = Driver(config_of(4))
    for i in range(64):
        length = int(rng.choice([20, 100, 500, 1500]) * rng.uniform(0.5, 1.5))
        driver.scheduler.submit(request(f"r{i}", prompt_of(rng, length), max_tokens=4))
    driver.drain()
    assigned = driver.scheduler.stats().assigned_tokens
    assert max(assigned) / np.mean(assigned) <= 1.3


def chat_hits(replicas: int, noise: bool) -> int:
    """Prefix hits (tokens) of a 50-turn chat, with other requests coming and going beside it."""
    rng = np.random.default_rng(3)
    driver = Driver(config_of(replicas))
    history: list[int] = []
    hits = 0
    for turn in range(50):
        if noise:
            for i in range(3):
                prompt = prompt_of(np.random.default_rng(turn * 10 + i), 120)
                driver.scheduler.submit(request(f"n{turn}.{i}", prompt, max_tokens=6))
        history += prompt_of(rng, 30)
        driver.scheduler.submit(request(f"t{turn}", history, max_tokens=12, ignore_eos=True))
        driver.drain()
        history += driver.tokens(f"t{turn}")
        hits += driver.outputs[f"t{turn}"][0].cached_tokens
    return hits


@pytest.mark.parametrize("noise", [False, True])
def test_chat_keeps_its_hits(noise: bool) -> None:
    one, four = chat_hits(1, noise), chat_hits(4, noise)
    assert one > 40_000 and four >= 0.9 * one


def test_replicas_without_rows_are_in_the_plan() -> None:
    config = config_of(4)
    driver = Driver(config)
    r = request("a", [5, 6, 7], max_tokens=9)
    driver.scheduler.submit(r)
    driver.drain()
    assert all(len(plan.replicas) == 4 for plan in driver.plans)
    assert sorted(part.rows for part in driver.plans[0].replicas) == [0, 0, 0, 3]
    assert driver.tokens("a") == alone(r, config)[0]


def test_place_prefers_hits_then_waits_for_a_busy_replica() -> None:
    far = Candidate(0, queued=0, uncached=1000, running=0, available=50)
    near = Candidate(1, queued=600, uncached=10, running=2, available=10)
    assert place([far, near], budget=256) is near
    assert place([far, near], budget=100) is None
    assert place([], budget=100) is None
