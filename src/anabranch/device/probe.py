"""What this machine is: memory, cores and abilities, without importing torch.

`python -m anabranch.device.probe` prints the same as one JSON line, for a parent that must not load
drivers itself. Linux: /proc, cgroup v1 and v2.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from anabranch.core.resolve import Machine

_NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


def probe(device: str = "auto") -> Machine:
    """Facts of the machine for `device`. ValueError if cuda is asked for and there is none."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if device == "cuda" and gpus == 0:
        raise ValueError("--device cuda: this machine has no NVIDIA device; use --device cpu")
    return Machine(
        device="cpu" if device == "auto" and gpus == 0 else "cuda" if device == "auto" else device,
        memory=usable_memory(),
        cores=usable_cores(),
        bf16=gpus > 0 or bool(_cpu_flags() & _NATIVE_BF16),
        gpus=gpus,
    )


def usable_memory() -> int:
    """Bytes this process may still use: what the system has available, within its cgroup's
    limit.
    """
    available = _meminfo("MemAvailable")
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, used = _number(limit), _number(usage)
        if most is not None and used is not None:
            available = min(available, max(0, most - used))
    return available


def usable_cores() -> int:
    """Cores of this process's mask, within its cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {name}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


if __name__ == "__main__":
    print(json.dumps(asdict(probe())))
