"""Takes a training run's folder, installs the better seed and writes the report.

    PYTHONPATH=src python -m training.collect OUT

Owns training/REPORT.md, training/curves.png and the weights in the package. Judges by the
accuracy in bf16 on problems with new numbers, then on held-out templates.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import shutil
from pathlib import Path
from typing import cast

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from training.tokenizer import PACKAGE

HERE = Path(__file__).resolve().parent
LIMIT = 25_000_000


def interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    z, p = 1.959964, right / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def accuracy(log: dict[str, object], split: str, dtype: str = "bfloat16") -> float:
    results = cast(dict[str, dict[str, float]], log["results"])
    return results[f"{split} {dtype}"]["accuracy"]


def draw(logs: list[dict[str, object]], path: Path) -> None:
    """Loss of every seed (log scale), and the accuracy of the probes on the way."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for log in logs:
        loss = cast(list[tuple[float, int, float]], log["loss"])[2:]
        left.plot(
            [s for s, _, _ in loss], [v for _, _, v in loss], lw=0.9, label=f"seed {log['seed']}"
        )
        probes = cast(list[tuple[float, int, float]], log["probes"])
        right.plot(
            [s for s, _, _ in probes], [v for _, _, v in probes], "o-", label=f"seed {log['seed']}"
        )
    left.set(xlabel="seconds", ylabel="loss on answers (nats per token)", yscale="log")
    right.set(xlabel="seconds", ylabel="accuracy, new numbers", ylim=(0, 1.02))
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def table(logs: list[dict[str, object]]) -> str:
    lines = [
        "| seed | split | dtype | right | accuracy | 95% interval |",
        "|---|---|---|---|---|---|",
    ]
    for log in logs:
        for result in cast(dict[str, dict[str, object]], log["results"]).values():
            n = cast(int, result["n"])
            right = round(cast(float, result["accuracy"]) * n)
            low, high = interval(right, n)
            lines.append(
                f"| {log['seed']} | {result['split']} | {result['dtype']} | {right} of {n} "
                f"| {right / n:.3f} | {low:.3f} to {high:.3f} |"
            )
    return "\n".join(lines)


def families(log: dict[str, object]) -> list[str]:
    """Where the held-out misses are."""
    results = cast(dict[str, dict[str, list[dict[str, str]]]], log["results"])
    count = collections.Counter(
        miss["template"].split("/")[0] for miss in results["held-out bfloat16"]["misses"]
    )
    return [f"{name} {misses}" for name, misses in count.most_common()]


def report(logs: list[dict[str, object]], best: dict[str, object], size: int) -> str:
    settings = cast(dict[str, object], best["settings"])
    gaps = ", ".join(
        f"{split} {100 * abs(accuracy(logs[0], split) - accuracy(logs[-1], split)):.1f} points"
        for split in ("new-numbers", "held-out")
    )
    steps = ", ".join(
        f"seed {log['seed']} {cast(list[tuple[float, int, float]], log['loss'])[-1][1]}"
        for log in logs
    )
    load = cast(list[list[float]], best["load"])
    spread = ", ".join(f"{min(row):.3f} to {max(row):.3f}" for row in load)
    text = f"""# Training of the packaged model

DeepSeek-V3's architecture (MLA with q_lora, sigmoid noaux_tc router with groups, a shared
expert, the first layer dense), {settings["parameters"]:,} parameters, trained from scratch
on word problems that `anabranch.demo.problems` generates. Both seeds ran at the same time
on {settings["device"]}, {settings["minutes"]} minutes of training each, start-up included.

    OUT=folder bash training/run.sh
    PYTHONPATH=src python -m training.collect folder

Seed {best["seed"]} is packaged: {size / 1e6:.1f} MB of weights. Gap of the seeds (bf16):
{gaps}.

{table(logs)}

*new-numbers*: trained templates with numbers that no training problem has. *held-out*:
templates that were never trained, and numbers kept out too. Greedy, with the weights
rounded to bf16 as they are shipped; the column *dtype* is the arithmetic's.

![loss and accuracy](curves.png)

Held-out misses of the packaged seed by setting: {", ".join(families(best)) or "none"}.

Settings: AdamW (0.9, 0.95), weight decay 0.1, rate {settings["lr"]} with warm-up and a
cosine over the time, {settings["batch_rows"]} rows of {settings["length"]} tokens a step,
loss on answers alone, gradient norm 1, bf16 activations over fp32 weights, torch
{settings["torch"]}, compiled: {settings["compiled"]}. Steps: {steps}. Experts are balanced
by the selection bias alone; share of the rows per expert, least to most, by layer:
{spread}.
"""
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    folder: Path = parser.parse_args().out
    found = sorted(folder.glob("seed*/log.json"))
    if not found:
        raise SystemExit(f"{folder}: no seed*/log.json")
    logs: list[dict[str, object]] = [json.loads(path.read_text()) for path in found]
    for path, log in zip(found, logs, strict=True):
        if len(cast(dict[str, object], log["results"])) < 4:
            raise SystemExit(f"{path}: the evaluation is not complete")
    index = max(
        range(len(logs)),
        key=lambda i: (accuracy(logs[i], "new-numbers"), accuracy(logs[i], "held-out")),
    )
    weights = found[index].with_name("model.safetensors")
    target = PACKAGE / "model.safetensors"
    shutil.copyfile(weights, target)
    (PACKAGE / "config.json").write_text(json.dumps(logs[index]["config"], indent=2) + "\n")
    size = sum(path.stat().st_size for path in PACKAGE.iterdir() if path.is_file())
    if size > LIMIT:
        raise SystemExit(f"the package's demo folder has {size} bytes, more than {LIMIT}")
    draw(logs, HERE / "curves.png")
    (HERE / "REPORT.md").write_text(report(logs, logs[index], target.stat().st_size))
    print((HERE / "REPORT.md").read_text())


if __name__ == "__main__":
    main()
