"""Trains the demo model on one GPU (or, for a trial, the CPU) within a given time.

    PYTHONPATH=src python -m training.train --data DIR --out OUT --seed 0 --minutes 7

Owns the schedule, the optimiser, checkpoints, the final evaluation and the export. The schedule
follows the clock, not a step count, so that a run always ends in time with a finished cosine.
Resuming (`--resume`) goes on from the last checkpoint in `--state`, with the time already spent.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from anabranch.demo.problems import Split, extract_answer, problems
from training.data import LENGTH
from training.model import Config, DemoModel, greedy, released_tensors, round_to_bf16
from training.tokenizer import ASSISTANT, BEGIN, END, PACKAGE, USER

NEW_TOKENS = 288


@dataclass
class Log:
    """What a run tells: written beside the weights as log.json."""

    seed: int
    settings: dict[str, object]
    loss: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds, step, mean loss since the last entry)"""
    probes: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds, step, accuracy on a few problems with new numbers)"""
    results: dict[str, dict[str, object]] = field(default_factory=dict)
    load: list[list[float]] = field(default_factory=list)


class Pool:
    """Rows on the device, growing as shards appear in the folder."""

    def __init__(self, folder: Path, device: torch.device, capacity: int) -> None:
        self.folder, self.seen, self.filled = folder, set[str](), 0
        self.rows = torch.empty((capacity, LENGTH + 1), dtype=torch.int16, device=device)

    def refresh(self, limit: int = 1000) -> None:
        """Takes in up to `limit` new shards, until the pool is full."""
        fresh = sorted(p for p in self.folder.glob("*.npy") if p.name not in self.seen)
        for path in fresh[:limit]:
            block = torch.from_numpy(np.load(path).astype(np.int16))
            if self.filled + len(block) > len(self.rows):
                return
            self.rows[self.filled : self.filled + len(block)] = block.to(self.rows.device)
            self.filled += len(block)
            self.seen.add(path.name)

    def wait(self, rows: int, seconds: float) -> None:
        stop = time.monotonic() + seconds
        while self.filled < rows:
            if time.monotonic() > stop:
                raise SystemExit(f"{self.folder}: {self.filled} of {rows} rows after {seconds} s")
            time.sleep(0.5)
            self.refresh()

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        index = torch.randint(self.filled, (count,), device=self.rows.device, generator=generator)
        return self.rows[index].long()


def answer_mask(ids: Tensor, assistant: int, end: int) -> Tensor:
    """Positions whose next token belongs to an answer (its end included)."""
    return ((ids == assistant).long().cumsum(1) - (ids == end).long().cumsum(1)) > 0


class Trainer:
    def __init__(self, options: argparse.Namespace, started: float) -> None:
        self.options, self.started, self.before, self.step = options, started, 0.0, 0
        self.device = torch.device(options.device)
        self.dtype: torch.dtype = getattr(torch, options.compute)
        torch.manual_seed(options.seed)
        self.tokenizer = Tokenizer.from_file(str(PACKAGE / "tokenizer.json"))
        vocabulary = self.tokenizer.get_vocab()
        self.special = {name: vocabulary[name] for name in (BEGIN, END, USER, ASSISTANT)}
        config = Config(vocab_size=self.tokenizer.get_vocab_size())
        self.model = DemoModel(config).to(self.device)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=options.lr, betas=(0.9, 0.95), fused=self.device.type == "cuda",
        )  # fmt: skip
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.log = Log(
            options.seed,
            {"lr": options.lr, "batch_rows": options.batch, "length": LENGTH,
             "minutes": options.minutes, "compiled": not options.eager, "torch": torch.__version__,
             "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "the CPU",
             "parameters": sum(p.numel() for p in self.model.parameters())},
        )  # fmt: skip

    # -- time ------------------------------------------------------------------------------

    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started

    def progress(self) -> float:
        """Share of the training time that is over; the evaluation's is not part of it."""
        return self.elapsed() / (60 * self.options.minutes)

    def set_rate(self) -> None:
        warm = min(1.0, (self.step + 1) / self.options.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress())))
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.lr * warm * (0.005 + 0.995 * cosine)

    # -- steps -----------------------------------------------------------------------------

    def loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        hidden, counts = self.model(inputs, self.dtype)
        logits = self.model.logits(hidden).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        mask = answer_mask(inputs, self.special[ASSISTANT], self.special[END]).flatten()
        return (losses * mask).sum() / mask.sum(), counts

    def compiled(self, pool: Pool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The loss as a compiled function, tried once; said aloud and in the log if it fails."""
        if self.options.eager:
            return self.loss
        forward = torch.compile(self.loss, dynamic=False)
        try:
            forward(pool.sample(self.options.batch, self.generator))[0].backward()
        except Exception as error:  # the compiler's own errors share no class
            print(f"seed {self.options.seed}: NOT compiled: {error!r}"[:2000], flush=True)
            self.log.settings["compiled"] = False
            return self.loss
        finally:
            self.optimiser.zero_grad(set_to_none=True)
        return forward

    def train(self, pool: Pool) -> None:
        """Steps until the time is over."""
        forward = self.compiled(pool)
        held: list[Tensor] = []
        load: Tensor | None = None
        next_save, next_probe = self.elapsed() + 60, self.elapsed() + 75
        while self.progress() < 1:
            loss, counts = forward(pool.sample(self.options.batch, self.generator))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.set_rate()
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            if self.progress() < 0.9:
                with torch.no_grad():
                    self.model.balance(counts, 1e-3)
            held.append(loss.detach())
            load = counts if load is None else load + counts
            self.step += 1
            if self.step % 50 == 0 or self.step <= 2:
                self.report(held, pool)
                held.clear()
            if self.elapsed() > next_save:
                self.save()
                next_save = self.elapsed() + 60
            if self.options.probe and self.elapsed() > next_probe and self.progress() < 0.95:
                accuracy = self.accuracy("new-numbers", self.options.probe, self.dtype, seed=7)[0]
                self.log.probes.append((self.elapsed(), self.step, accuracy))
                print(f"seed {self.options.seed} probe {accuracy:.3f}", flush=True)
                next_probe = self.elapsed() + 75
        if load is not None:
            self.log.load = (load.float() / load.float().sum(1, keepdim=True)).tolist()
        self.save()

    def report(self, held: list[Tensor], pool: Pool) -> None:
        mean = float(torch.stack(held).mean())
        if not math.isfinite(mean):
            raise SystemExit(f"seed {self.options.seed}: the loss is {mean} at step {self.step}")
        self.log.loss.append((self.elapsed(), self.step, mean))
        pool.refresh(40)
        if self.step % 500 == 0 or self.step <= 50:
            tokens = self.step * self.options.batch * LENGTH
            print(
                f"seed {self.options.seed} {self.elapsed():.0f} s step {self.step} loss {mean:.4f} "
                f"{tokens / 1e6:.0f} M tokens, pool {pool.filled}", flush=True,
            )  # fmt: skip

    # -- evaluation ------------------------------------------------------------------------

    def accuracy(
        self, split: Split, count: int, dtype: torch.dtype, seed: int
    ) -> tuple[float, list[dict[str, str]]]:
        """Share of right answers of `count` problems, and the misses."""
        tested = list(problems(split, count, seed))
        s = self.special
        prompts = [
            [s[BEGIN], s[USER], *self.tokenizer.encode(p.question).ids, s[ASSISTANT]]
            for p in tested
        ]
        told: list[list[int]] = []
        for i in range(0, count, 500):
            told += greedy(self.model, prompts[i : i + 500], NEW_TOKENS, s[END], dtype)
        misses = [
            {"template": p.template, "question": p.question, "expected": p.solution, "got": text}
            for p, text in zip(tested, map(self.tokenizer.decode, told), strict=True)
            if extract_answer(text) != p.answer
        ]
        return 1 - len(misses) / count, misses

    def evaluate(self, count: int) -> None:
        """Accuracy of the rounded weights on both splits, in bf16 and fp32."""
        round_to_bf16(self.model)
        splits: tuple[Split, Split] = ("new-numbers", "held-out")
        for dtype in {self.dtype: None, torch.float32: None}:
            for split in splits:
                accuracy, misses = self.accuracy(split, count, dtype, seed=0)
                name = f"{split} {str(dtype).removeprefix('torch.')}"
                self.log.results[name] = {
                    "split": split, "dtype": str(dtype).removeprefix("torch."), "n": count,
                    "accuracy": accuracy, "misses": misses,
                }  # fmt: skip
                print(
                    f"seed {self.options.seed} {name}: {accuracy:.3f} of {count}, "
                    f"{self.elapsed():.0f} s", flush=True,
                )  # fmt: skip
                self.write_log()

    # -- files -----------------------------------------------------------------------------

    def save(self) -> None:
        state: Path = self.options.state
        state.parent.mkdir(parents=True, exist_ok=True)
        part = state.with_suffix(".part")
        torch.save(
            {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(),
             "generator": self.generator.get_state(), "step": self.step,
             "elapsed": self.elapsed(), "loss": self.log.loss, "probes": self.log.probes},
            part,
        )  # fmt: skip
        part.rename(state)

    def resume(self) -> None:
        found = torch.load(self.options.state, map_location=self.device, weights_only=True)
        self.model.load_state_dict(found["model"])
        self.optimiser.load_state_dict(found["optimiser"])
        self.generator.set_state(found["generator"].cpu())
        self.step, self.before = found["step"], found["elapsed"]
        self.log.loss, self.log.probes = found["loss"], found["probes"]

    def export(self) -> None:
        out: Path = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        tensors = released_tensors(self.model)
        save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
        self.write_log()

    def write_log(self) -> None:
        settings = self.model.c.released()
        (self.options.out / "log.json").write_text(
            json.dumps({**vars(self.log), "config": settings})
        )


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder of shards")
    parser.add_argument("--out", type=Path, required=True, help="model.safetensors and log.json")
    parser.add_argument("--state", type=Path, required=True, help="checkpoint file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=7.0, help="training, start-up included")
    parser.add_argument("--batch", type=int, default=128, help="rows of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=400, help="steps")
    parser.add_argument("--evaluate", type=int, default=500, help="problems of each split")
    parser.add_argument("--probe", type=int, default=128, help="problems of a probe on the way")
    parser.add_argument("--capacity", type=int, default=4_000_000, help="rows of the pool")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    options = parser.parse_args()
    trainer = Trainer(options, started)
    if options.resume:
        trainer.resume()
    pool = Pool(options.data, trainer.device, options.capacity)
    pool.wait(8 * options.batch, 60)
    trainer.train(pool)
    trainer.export()
    trainer.evaluate(options.evaluate)


if __name__ == "__main__":
    main()
