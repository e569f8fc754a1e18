"""What moving bytes costs: a small table per transport, shipped as data, rewritten by calibration.

Owns the lines (latency and rate) that automatic choices are made from, their file form and the fit
from measurements. Knows neither models nor groups; who measures is given as a function.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """Time of one call: `latency` us, then `rate` bytes per us (so MB/s)."""

    latency: float
    rate: float

    def at(self, nbytes: float) -> float:
        """Microseconds for `nbytes`."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class Costs:
    """One transport on one kind of machine. Bytes are those each rank puts into the verb.

    copy: placing rows in a buffer. ragged: us a verb pays when its members' counts differ. call: us
    of one op beside the verbs.
    shared: peers can address the memory (what the fused exchange needs). fused: that exchange.
    memory: bytes per us at which a rank reads weights. products: floating-point operations per us
    of a large matrix product in fp32, of a rank of one core or one GPU.
    """

    all_gather: Line
    reduce_scatter: Line
    all_reduce: Line
    all_to_all: Line
    exchange: Line
    fused: Line
    copy: Line
    ragged: float
    call: float
    shared: bool
    memory: float
    products: float


VERBS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "fused", "copy")

SHIPPED: Mapping[str, Costs] = {
    # two threads on two Zen 4 cores: they pay the interpreter lock at every meeting
    "threads": Costs(
        Line(60, 9000), Line(90, 6000), Line(90, 5000), Line(110, 9000), Line(110, 9000),
        Line(60, 9000), Line(1.5, 20000), 0.0, 20.0, True, 14000, 50_000,
    ),
    # two processes on a 32-core Sapphire Rapids host: bench/results, medians, from Python
    "shm": Costs(
        Line(4.4, 3000), Line(5.3, 4500), Line(6.2, 2430), Line(4.9, 5200), Line(6.0, 3650),
        Line(10, 4800), Line(0.5, 10600), 0.5, 20.0, True, 14000, 50_000,
    ),
    "gloo": Costs(
        Line(212, 957), Line(200, 980), Line(288, 231), Line(131, 2470), Line(182, 1750),
        Line(290, 231), Line(0.5, 10600), 6.0, 20.0, False, 14000, 50_000,
    ),
    # two H200s over NVLink; ragged gathers are composed of broadcasts
    "nccl": Costs(
        Line(11.6, 150_000), Line(11.8, 150_000), Line(11.7, 120_000), Line(11.4, 370_000),
        Line(11.4, 370_000), Line(3.8, 300_000), Line(2.0, 2_000_000), 25.0, 2.0, False,
        4_200_000, 400_000_000,
    ),
}  # fmt: skip

SMALL, LARGE = 4 << 10, 1 << 20
"""Sizes at which a verb is measured to fit its line."""


def fit(verb: Callable[[int], float]) -> Line:
    """The line through two measurements; verb(nbytes) is the median time in us of one call."""
    small, large = verb(SMALL), verb(LARGE)
    slope = max(large - small, 1e-3) / (LARGE - SMALL)
    return Line(max(small - SMALL * slope, 0.0), 1 / slope)


def calibrate(transport: str, measure: Callable[[str, int], float]) -> Costs:
    """The table of a transport on this machine. measure(verb, nbytes): median us of one call.

    Figures that no verb measures (memory, products, ragged, call, shared) stay as shipped.
    """

    def line(verb: str) -> Line:
        return fit(lambda nbytes: measure(verb, nbytes))

    return replace(
        SHIPPED[transport],
        all_gather=line("all_gather"),
        reduce_scatter=line("reduce_scatter"),
        all_reduce=line("all_reduce"),
        all_to_all=line("all_to_all"),
        exchange=line("exchange"),
        fused=line("fused"),
        copy=line("copy"),
    )


def save(path: Path, tables: Mapping[str, Costs]) -> None:
    """Write tables by transport, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(
        json.dumps({name: asdict(costs) for name, costs in tables.items()}, indent=1)
    )
    scratch.replace(path)


def load(path: Path, transport: str) -> Costs:
    """The calibrated table of a transport, or the shipped one where the file has none.

    ValueError names a file that is not one of ours: it is to be deleted or calibrated again.
    """
    if not path.is_file():
        return SHIPPED[transport]
    try:
        found = json.loads(path.read_text())
        return read(found[transport]) if transport in found else SHIPPED[transport]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a table of costs ({error}); delete it or calibrate again"
        ) from None


def read(table: Mapping[str, Any]) -> Costs:
    """A table from its JSON form (`dataclasses.asdict`)."""
    lines = {verb: Line(**table[verb]) for verb in VERBS}
    rest = {f.name: table[f.name] for f in fields(Costs) if f.name not in VERBS}
    return Costs(**lines, **rest)  # type: ignore[arg-type]
