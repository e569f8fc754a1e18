"""Counters and histograms of the front, and their Prometheus text form (exposition format 0.0.4).

Owns names and buckets. The brain's own numbers (`Stats`) are rendered beside them, never stored
here.
"""

from bisect import bisect_left
from collections.abc import Iterable

from anabranch.core.messages import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Cumulative buckets over seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {total}"


class Metrics:
    """What the front measures, from a request's arrival to its last byte handed on."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_LATENCY)
        self.inter_token_latency = Histogram(_ITL)
        self.e2e_request_latency = Histogram(_LONG)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_prompt_tokens = 0
        self.finished: dict[str, int] = {}

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def render(self, stats: Stats | None, in_flight: int) -> str:
        """The whole page; without `stats` (the brain does not answer) the front's numbers alone."""
        lines: list[str] = []
        histograms = {
            "time_to_first_token": ("From arrival to the first token", self.time_to_first_token),
            "inter_token_latency": ("Between tokens of a choice", self.inter_token_latency),
            "e2e_request_latency": ("From arrival to the last token", self.e2e_request_latency),
        }
        for name, (text, histogram) in histograms.items():
            full = f"anabranch_{name}_seconds"
            lines += _head(full, "histogram", text)
            lines += histogram.lines(full)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of finished requests", self.prompt_tokens),
            ("generation_tokens", "Tokens generated", self.generation_tokens),
            ("prefix_cache_hit_tokens", "Prompt tokens served by the prefix cache",
             self.cached_prompt_tokens),
        ):  # fmt: skip
            lines += _counter(name, text, value)
        lines += _head("anabranch_requests_finished_total", "counter", "Choices by finish reason")
        for reason, count in sorted(self.finished.items()):
            lines.append(f'anabranch_requests_finished_total{{reason="{reason}"}} {count}')
        lines += _gauge("requests_in_flight", "Choices accepted and not finished", in_flight)
        if stats is not None:
            lines += _engine_lines(stats)
        return "\n".join(lines) + "\n"


def _engine_lines(stats: Stats) -> list[str]:
    lines = _gauge("requests_running", "Requests that hold a seat", stats.running)
    lines += _gauge("requests_waiting", "Requests that wait for a seat", stats.waiting)
    lines += _gauge("kv_pages", "KV pages of a replica", stats.total_pages)
    lines += _head("anabranch_kv_pages_free", "gauge", "Free KV pages of each replica")
    for replica, pages in enumerate(stats.free_pages):
        lines.append(f'anabranch_kv_pages_free{{replica="{replica}"}} {pages}')
    lines += _counter("preemptions", "Requests whose pages were taken back", stats.preemptions)
    lines += _counter("engine_steps", "Steps run", stats.steps)
    return lines


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}.", f"# TYPE {name} {kind}"]


def _counter(name: str, text: str, value: int) -> list[str]:
    full = f"anabranch_{name}_total"
    return [*_head(full, "counter", text), f"{full} {value}"]


def _gauge(name: str, text: str, value: int) -> list[str]:
    full = f"anabranch_{name}"
    return [*_head(full, "gauge", text), f"{full} {value}"]
