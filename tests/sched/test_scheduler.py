"""The scheduler against a worker whose tokens depend on every cached position it reads."""

import numpy as np
import pytest
from fake_worker import EOS, VOCAB, Driver, alone, roll
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.plan import NOT_A_TOKEN, StepPlan, StepResult
from anabranch.core.request import FieldError, Request, SamplingParams
from anabranch.sched import QueueFull, SchedulerConfig
from anabranch.sched.policy import prefill_share


def request(name: str, prompt: list[int], **sampling: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**sampling))  # type: ignore[arg-type]


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return [int(t) for t in rng.integers(10, VOCAB, length)]


def check_budget(plan: StepPlan, config: SchedulerConfig) -> None:
    for part in plan.replicas:
        plain = int((part.decode.tokens == -1).sum())
        assert part.rows - plain <= prefill_share(config.prefill_rows, plain)
        assert plain <= config.max_running


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SchedulerConfig, list[Request], list[tuple[int, str, int]]]:
    """A configuration, requests with shared prefixes, and (step, action, request index) events."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    pages = draw(st.integers(-(-40 // page_size), -(-160 // page_size)))
    config = SchedulerConfig(
        pages=pages,
        replicas=draw(st.sampled_from([1, 1, 2, 4])),
        page_size=page_size,
        max_running=draw(st.integers(1, 9)),
        prefill_rows=draw(st.sampled_from([1, 5, 16, 64])),
        max_model_len=200,
        vocab_size=VOCAB,
        eos_ids=(EOS,),
        prefix_cache=draw(st.booleans()),
        extend_rows=draw(st.sampled_from([0, 2, 8])),
        reach=draw(st.sampled_from([None, 7, 100])),
        depth=draw(st.sampled_from([1, 2, 3])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    stems = [prompt_of(rng, 40) for _ in range(2)]
    requests = []
    for i in range(draw(st.integers(1, 16))):
        stem = stems[int(rng.integers(2))][: int(rng.integers(0, 40))]
        prompt = (stem + prompt_of(rng, int(rng.integers(1, 30))))[: config.capacity]
        kind = int(rng.integers(8))
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 40)) if kind else None,
            ignore_eos=bool(rng.integers(2)),
            stop_ids=(int(rng.integers(VOCAB)),),
            logprobs=1 if kind == 2 else None,
            prompt_logprobs=1 if kind == 3 else None,
        )
        score = int(rng.integers(1, len(prompt) + 1)) if kind == 4 else None
        requests.append(Request(f"r{i}", tuple(prompt), sampling, score_from=score))
    events = [(int(rng.integers(0, 40)), "submit", i) for i in range(len(requests))]
    if draw(st.booleans()):
        events += [(int(rng.integers(0, 60)), "abort", i) for i in range(0, len(requests), 3)]
    return config, requests, sorted(events, key=lambda e: e[0])


def play(
    config: SchedulerConfig, requests: list[Request], events: list[tuple[int, str, int]]
) -> Driver:
    driver = Driver(config)
    for step, action, index in events:
        while len(driver.plans) < step and driver.step():
            pass
        if action == "submit":
            driver.scheduler.submit(requests[index])
        else:
            driver.take(driver.scheduler.abort(requests[index].id))
    driver.drain()
    return driver


@settings(max_examples=200, deadline=None, derandomize=True)
@given(worlds())
def test_every_request_ends_as_if_alone(
    world: tuple[SchedulerConfig, list[Request], list[tuple[int, str, int]]],
) -> None:
    config, requests, events = world
    driver = play(config, requests, events)
    assert driver.scheduler.idle
    for plan in driver.plans:
        check_budget(plan, config)
    stats = driver.scheduler.stats()
    assert stats.free_pages == (config.pages,) * config.replicas
    assert stats.running == stats.waiting == 0
    for r in requests:
        reason = driver.reason(r.id)
        if r.score_from is not None:
            if reason != "abort":
                check_scores(driver, r)
            continue
        tokens, wanted = alone(r, config)
        if reason == "abort":
            got = driver.tokens(r.id)
            assert got == tokens[: len(got)]
            continue
        assert (driver.tokens(r.id), reason) == (tokens, wanted)
        check_details(driver, r, wanted, tokens[-1])


def check_scores(driver: Driver, r: Request) -> None:
    """Every position's logits once, in order; `score_from` rows as prefill, then one by one."""
    history, wanted = 1, []
    for token in r.prompt:
        history = roll(history, token)
        wanted.append(history)
    pieces = [piece for output in driver.outputs[r.id] for piece in output.logits]
    got = b"".join(data for _, data in pieces)
    assert got == np.array(wanted, np.float32).tobytes()
    assert [first for first, _ in pieces if first >= (r.score_from or 0)] == list(
        range(r.score_from or 0, len(r.prompt))
    )
    assert driver.reason(r.id) == "length"


def check_details(driver: Driver, r: Request, reason: str, last: int) -> None:
    outputs = driver.outputs[r.id]
    assert outputs[-1].stop_token == (last if reason == "stop" else None)
    assert len({output.cached_tokens for output in outputs}) == 1
    if r.sampling.logprobs is not None:
        entries = [entry for output in outputs for entry in output.logprobs]
        assert [entry.token for entry in entries] == driver.tokens(r.id)
    if r.sampling.prompt_logprobs is not None:
        entries = outputs[0].prompt_logprobs or ()
        assert tuple(entry.token for entry in entries) == r.prompt[1:]
        assert [entry.logprob for entry in entries] == list(range(len(r.prompt) - 1))
        assert all(output.prompt_logprobs is None for output in outputs[1:])


@pytest.mark.parametrize("depth", [1, 2])
def test_small_cache_many_requests(depth: int) -> None:
    """40 pages, 64 requests with shared prefixes and aborts: hits and preemptions really happen."""
    config = SchedulerConfig(
        pages=40, page_size=16, max_running=16, prefill_rows=64, max_model_len=512,
        vocab_size=VOCAB, eos_ids=(EOS,), depth=depth,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    stems = [prompt_of(rng, 100) for _ in range(3)]
    requests = [
        request(
            f"r{i}",
            stems[i % 3][: int(rng.integers(0, 101))] + prompt_of(rng, int(rng.integers(1, 101))),
            max_tokens=int(rng.integers(1, 120)),
            ignore_eos=True,
        )
        for i in range(64)
    ]
    events = [(i, "submit", i) for i in range(64)] + [
        (int(rng.integers(400)), "abort", i) for i in range(0, 64, 9)
    ]
    driver = play(config, requests, sorted(events, key=lambda e: (e[0], e[1] == "abort")))
    stats = driver.scheduler.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0
    assert stats.free_pages == (40,)
    for r in requests:
        tokens, _ = alone(r, config)
        got = driver.tokens(r.id)
        assert got == (tokens[: len(got)] if driver.reason(r.id) == "abort" else tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_shortage_hardly_delays_the_oldest(depth: int) -> None:
    """Latest arrivals give way, also while their tokens are under way."""
    config = SchedulerConfig(
        pages=12, page_size=16, max_running=8, max_model_len=200, vocab_size=VOCAB, depth=depth
    )
    driver = Driver(config)
    for i in range(8):
        driver.scheduler.submit(request(f"r{i}", [i, 5], ignore_eos=True, max_tokens=70))
    while "r0" not in driver.outputs or driver.reason("r0") is None:
        driver.step()
    assert driver.scheduler.stats().preemptions > 0
    assert len(driver.plans) <= 70 + 70 // 16 + depth
    driver.drain()
    assert all(driver.reason(f"r{i}") == "length" for i in range(8))


def test_preempted_before_its_prompt_logprobs_were_out() -> None:
    config = SchedulerConfig(
        pages=20, page_size=4, prefill_rows=4, max_model_len=200, vocab_size=VOCAB
    )
    driver = Driver(config)
    driver.scheduler.submit(request("a", [1, 2], ignore_eos=True, max_tokens=60))
    driver.step()
    r = request("b", list(range(100, 160)), max_tokens=1, prompt_logprobs=0)
    driver.scheduler.submit(r)
    driver.drain()
    assert driver.scheduler.stats().preemptions > 0
    check_details(driver, r, "length", driver.tokens("b")[-1])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_whose_logits_are_no_numbers_ends_alone(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SchedulerConfig(
        pages=40, page_size=4, max_model_len=200, vocab_size=VOCAB, depth=depth
    )
    driver = Driver(config)
    lengths = {"a": 5, "b": 6, "c": 7}
    requests = [request(n, list(range(9, 9 + k)), max_tokens=20) for n, k in lengths.items()]
    want = {r.id: alone(r, config)[0] for r in requests}
    lost = want["b"][3]
    assert lost not in want["a"] + want["c"] + want["b"][:3]
    finish = driver.worker.finish

    def without_lost() -> StepResult:
        result = finish()
        for part in result.replicas:
            part.token[part.token == lost] = NOT_A_TOKEN
        return result

    monkeypatch.setattr(driver.worker, "finish", without_lost)
    for r in requests:
        driver.scheduler.submit(r)
    driver.drain()
    end = driver.outputs["b"][-1]
    assert end.finish_reason == "error" and "position 8 are not finite" in (end.error or "")
    assert driver.tokens("b") == want["b"][:3]
    assert driver.tokens("a") == want["a"] and driver.tokens("c") == want["c"]
    assert driver.scheduler.stats().free_pages == (40,)


@pytest.mark.parametrize("length", [16, 17, 32, 33])
def test_same_prompt_again_computes_at_least_one_token(length: int) -> None:
    config = SchedulerConfig(pages=40, page_size=16, max_model_len=200, vocab_size=VOCAB)
    driver = Driver(config)
    for name in ("a", "b"):
        r = request(name, list(range(length)), max_tokens=20)
        driver.scheduler.submit(r)
        driver.drain()
        assert driver.tokens(name) == alone(r, config)[0]
    assert driver.outputs["b"][0].cached_tokens == (length - 1) // 16 * 16


def test_row_of_an_ended_request_runs_once_more_at_depth_two() -> None:
    """Ended by a stop id in step n, it still runs in n+1; its token is dropped, its pages wait."""
    config = SchedulerConfig(pages=8, page_size=4, max_model_len=32, depth=2, vocab_size=VOCAB)
    r = request("a", [1, 2, 3], max_tokens=20)
    stop = alone(r, config)[0][4]
    r = request("a", [1, 2, 3], max_tokens=20, stop_ids=(stop,))
    driver = Driver(config)
    driver.scheduler.submit(r)
    while "a" not in driver.outputs or driver.reason("a") is None:
        driver.step()
    assert driver.reason("a") == "stop" and driver.scheduler.in_flight == 1
    held = 8 - driver.scheduler.stats().free_pages[0]
    assert held > 0
    driver.drain()
    assert driver.scheduler.stats().free_pages == (8,) and driver.scheduler.idle
    assert len(driver.tokens("a")) == 5 and len(driver.plans) == 6


def test_length_limit_plans_no_row_too_many() -> None:
    config = SchedulerConfig(pages=8, page_size=4, max_model_len=32, depth=2, vocab_size=VOCAB)
    driver = Driver(config)
    driver.scheduler.submit(request("a", [1, 2, 3], max_tokens=3))
    driver.drain()
    assert len(driver.plans) == 3 and driver.reason("a") == "length"


def test_capacity_ends_with_length() -> None:
    config = SchedulerConfig(pages=2, page_size=4, max_model_len=100, vocab_size=VOCAB)
    driver = Driver(config)
    driver.scheduler.submit(request("a", [1, 2, 3], ignore_eos=True))
    driver.drain()
    assert driver.reason("a") == "length" and len(driver.tokens("a")) == 9 - 3


def test_refusals_name_the_field_and_leave_nothing() -> None:
    config = SchedulerConfig(
        pages=2, page_size=4, max_model_len=100, max_running=1, max_waiting=1, vocab_size=50
    )
    scheduler = Driver(config).scheduler
    for bad, field in [
        (request("a", list(range(9))), "prompt"),
        (request("a", [50]), "prompt"),
        (request("a", []), "prompt"),
        (request("a", [1], temperature=float("nan")), "temperature"),
    ]:
        with pytest.raises(FieldError) as error:
            scheduler.submit(bad)
        assert error.value.field == field
    scheduler.submit(request("a", [1]))
    with pytest.raises(FieldError, match="already running"):
        scheduler.submit(request("a", [1]))
    scheduler.submit(request("b", [1]))  # one may run and one wait: two come before any step
    with pytest.raises(QueueFull):
        scheduler.submit(request("c", [1]))
    assert scheduler.stats().waiting == 2


def test_deadline() -> None:
    config = SchedulerConfig(pages=64, page_size=4, max_model_len=200, vocab_size=VOCAB)
    driver = Driver(config)
    driver.scheduler.submit(
        Request("a", (1, 2), SamplingParams(ignore_eos=True, max_tokens=150), deadline=5.0),
        now=100.0,
    )
    assert driver.scheduler.next_deadline == 105.0
    driver.step()
    assert driver.scheduler.expire(104.9) == []
    driver.take(driver.scheduler.expire(105.0))
    assert driver.reason("a") == "timeout"
    driver.drain()
    assert driver.scheduler.idle and driver.scheduler.next_deadline is None


def test_long_prefill_does_not_stall_decode() -> None:
    """Every step with a prefill chunk also carries the decode row of the running request."""
    config = SchedulerConfig(pages=400, page_size=4, max_model_len=1500, prefill_rows=32)
    driver = Driver(config)
    driver.scheduler.submit(request("a", [1, 2], ignore_eos=True, max_tokens=60))
    driver.step()
    driver.scheduler.submit(request("b", list(range(1000)), max_tokens=1))
    driver.drain()
    mixed = [p.replicas[0] for p in driver.plans if p.replicas[0].prefill.rows]
    assert len(mixed) > 30 and all(part.decode.rows == 1 for part in mixed[1:])
    assert all(part.rows <= 32 for part in mixed)


def test_chunks_of_a_long_prompt_cost_alike_while_others_wait() -> None:
    """Later chunks are shorter, by what their attention costs, where a decode row waits for them,
    also one of another replica; alone they have the whole budget."""
    config = SchedulerConfig(
        pages=400, replicas=2, page_size=4, max_model_len=1500, prefill_rows=32, reach=200
    )
    for watched in (False, True):
        driver = Driver(config)
        if watched:
            driver.scheduler.submit(request("a", [1, 2], ignore_eos=True, max_tokens=120))
            driver.step()
        driver.scheduler.submit(request("b", list(range(1000)), max_tokens=1))
        driver.drain()
        parts = [part.prefill for plan in driver.plans for part in plan.replicas]
        chunks = [(int(p.start[0]), int(p.count[0])) for p in parts if p.rows > 2]
        assert sum(count for _, count in chunks) >= 999 - 8
        costs = [sum(1 + (s + i) / 200 for i in range(n)) for s, n in chunks[:-1]]
        if watched:
            assert max(costs) <= 1.01 * costs[0] and min(costs) >= 0.8 * costs[0]
            assert chunks[0][1] == 32 and chunks[-2][1] < 8
        else:
            assert all(count == 32 for _, count in chunks[:-1])


def test_decode_does_not_starve_prefill() -> None:
    config = SchedulerConfig(pages=400, page_size=4, max_model_len=500, prefill_rows=8)
    driver = Driver(config)
    for i in range(20):
        driver.scheduler.submit(request(f"a{i}", [i], ignore_eos=True, max_tokens=100))
    for _ in range(20):
        driver.step()
    before = len(driver.plans)
    driver.scheduler.submit(request("b", list(range(40)), max_tokens=1))
    while "b" not in driver.outputs:
        driver.step()
    assert len(driver.plans) - before <= 40 // 2 + 1


def test_short_extend_over_long_prefix_runs_as_decode_rows() -> None:
    config = SchedulerConfig(pages=100, page_size=16, max_model_len=500, prefill_rows=64)
    driver = Driver(config)
    prompt = list(range(100, 228))
    driver.scheduler.submit(request("a", prompt, max_tokens=1))
    driver.drain()
    driver.scheduler.submit(request("b", [*prompt, 1, 2, 3], max_tokens=1))
    driver.drain()
    part = driver.plans[-1].replicas[0]
    assert part.decode.count.tolist() == [3] and part.prefill.rows == 0
    assert part.decode.tokens.tolist() == [1, 2, 3]
    assert driver.outputs["b"][0].cached_tokens == 128
    assert driver.tokens("b") == alone(request("b", [*prompt, 1, 2, 3], max_tokens=1), config)[0]


def test_every_shared_prefix_length_hits_its_full_pages() -> None:
    """Shared lengths up to two pages and one: full pages are hit, answers as without a cache."""
    for shared in range(1, 2 * 16 + 2):
        config = SchedulerConfig(pages=40, page_size=16, max_model_len=200, vocab_size=VOCAB)
        driver = Driver(config)
        rng = np.random.default_rng(shared)
        stem = prompt_of(rng, shared)
        for name in ("a", "b"):
            r = request(name, stem + prompt_of(rng, 9), max_tokens=20)
            driver.scheduler.submit(r)
            driver.drain()
            assert driver.tokens(name) == alone(r, config)[0]
        assert driver.outputs["b"][0].cached_tokens == shared // 16 * 16


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_equal_prompts_at_once_are_computed_once(depth: int, replicas: int) -> None:
    """Choices of one prompt wait for its pages instead of computing them too."""
    config = SchedulerConfig(
        pages=200, page_size=16, max_model_len=600, prefill_rows=64, depth=depth, replicas=replicas
    )
    driver = Driver(config)
    prompt = list(range(250))
    for i in range(8):
        driver.scheduler.submit(request(f"r{i}", prompt, max_tokens=5, ignore_eos=True))
    other = request("other", list(range(400, 420)), max_tokens=5, ignore_eos=True)
    driver.scheduler.submit(other)
    driver.drain()
    stats = driver.scheduler.stats()
    assert sum(stats.assigned_tokens) <= replicas * 250 + 8 * 16 + 20
    assert all(driver.tokens(f"r{i}") == driver.tokens("r0") for i in range(8))
    assert driver.tokens("other") == alone(other, config)[0]


def test_waiting_for_a_prefix_ends_with_its_maker() -> None:
    """Its maker is aborted half way: the one that waited computes the rest itself."""
    config = SchedulerConfig(
        pages=200, page_size=16, max_model_len=600, prefill_rows=64, vocab_size=VOCAB
    )
    driver = Driver(config)
    prompt = list(range(250))
    driver.scheduler.submit(request("a", prompt, max_tokens=5))
    r = request("b", prompt, max_tokens=5)
    driver.scheduler.submit(r)
    driver.step()
    driver.step()
    assert driver.scheduler.stats().waiting == 1
    driver.take(driver.scheduler.abort("a"))
    driver.drain()
    assert driver.tokens("b") == alone(r, config)[0]
    assert driver.outputs["b"][0].cached_tokens == 128


def test_second_turn_hits_generated_tokens() -> None:
    config = SchedulerConfig(pages=40, page_size=4, max_model_len=200, vocab_size=VOCAB)
    driver = Driver(config)
    driver.scheduler.submit(request("a", [1, 2, 3], ignore_eos=True, max_tokens=30))
    driver.drain()
    history = [1, 2, 3, *driver.tokens("a")]
    driver.scheduler.submit(request("b", [*history, 5, 6], max_tokens=8))
    driver.drain()
    assert driver.outputs["b"][0].cached_tokens == 32


def test_new_weights_forget_prefixes() -> None:
    """Neither cached pages nor those of a request that ran under both weights are hit."""
    config = SchedulerConfig(pages=40, page_size=4, max_model_len=200, vocab_size=VOCAB)
    driver = Driver(config)
    driver.scheduler.submit(request("a", list(range(20)), max_tokens=1))
    driver.drain()
    driver.scheduler.submit(request("b", list(range(50, 70)), ignore_eos=True, max_tokens=30))
    for _ in range(5):
        driver.step()
    driver.scheduler.forget_prefixes()
    driver.drain()
    for name, prompt in (("c", list(range(20))), ("d", [*range(50, 70), *driver.tokens("b")])):
        driver.scheduler.submit(request(name, prompt, max_tokens=1))
        driver.drain()
        assert driver.outputs[name][0].cached_tokens == 0
    assert driver.scheduler.stats().free_pages == (40,)


def test_seed_depends_on_config_and_order_only() -> None:
    def seeds(seed: int) -> list[int]:
        driver = Driver(SchedulerConfig(pages=40, seed=seed))
        for i in range(3):
            driver.scheduler.submit(request(f"{seed}-{i}", [1]))
        driver.step()
        return [join.seed for join in driver.plans[0].replicas[0].join]

    assert seeds(1) == seeds(1) and len(set(seeds(1) + seeds(2))) == 6
