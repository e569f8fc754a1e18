"""`anabranch env` and `anabranch pull`: what is installed here, what is in the cache, what moving
bytes costs here."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import anabranch
from anabranch.comm.endpoint import KINDS, Endpoint, make_endpoint
from anabranch.engine.prepare import costs_file
from anabranch.layout.costs import VERBS, Costs, Line, read, save
from anabranch.weights.catalog import CATALOGUE, cache_folder
from anabranch.weights.locate import pull as fetch

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "fastapi", "uvicorn")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")
_PROBE_SECONDS = 60
_CALIBRATE_SECONDS = 300


def pull(model: str, as_json: bool) -> int:
    """Fetch a model and print where it lies."""
    path = fetch(model)
    print(json.dumps({"model": model, "path": str(path)}) if as_json else path)
    return 0


def show(as_json: bool) -> int:
    facts: dict[str, object] = {
        "anabranch": anabranch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "cores": sorted(os.sched_getaffinity(0)),
        "instruction_sets": _instruction_sets(),
        "device": _child("anabranch.device.probe"),
        "cache": str(cache_folder()),
        "catalogue": sorted(CATALOGUE),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k in _VARIABLES},
    }
    if as_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:17}", value if isinstance(value, str) else json.dumps(value))
    return 0


def calibrate(as_json: bool) -> int:
    """Time the verbs between two processes of this host, over each transport there is, and keep
    the tables in the cache, where every later start reads them."""
    tables: dict[str, Costs] = {}
    for kind in KINDS:
        try:
            endpoint = make_endpoint(kind)
        except ValueError as error:  # shm, where nothing was compiled
            print(error, file=sys.stderr)
            continue
        try:
            tables[kind] = read(json.loads(_two_ranks(endpoint)))
        finally:
            endpoint.close()
    save(costs_file(), tables)
    if as_json:
        print(json.dumps({kind: asdict(table) for kind, table in tables.items()}))
    for kind, table in {} if as_json else tables.items():
        for verb in VERBS:
            line: Line = getattr(table, verb)
            print(f"{kind:6}{verb:16}{line.latency:9.1f} us + 1 us per {line.rate:.0f} bytes")
    if not as_json:
        print(f"written to {costs_file()}")
    return 0


def _two_ranks(endpoint: Endpoint) -> str:
    """What the first of two ranks prints. RuntimeError with the complaint of one that fails."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "anabranch.comm.calibrate", endpoint.text, str(rank), "2"],
            pass_fds=endpoint.fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=_CALIBRATE_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, complaint) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise RuntimeError(f"calibration ended with {rank.returncode}: {complaint[-500:]}")
    return said[0][0]


_VARIABLES = ("ANABRANCH_ISA", "ANABRANCH_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _cpu() -> str:
    for line in _cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _instruction_sets() -> list[str]:
    for line in _cpuinfo().splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return [flag for flag in _FLAGS if flag in values.split()]
    return []


def _child(module: str) -> object:
    """What a module prints as JSON in a process of its own: torch stays out of this one."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, check=False)
        return json.loads(done.stdout)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        return f"the probe did not answer: {error}"
