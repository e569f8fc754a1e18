"""Training rows: worker processes write problems, sums and chat turns as packed token rows.

    PYTHONPATH=src python -m training.data --out DIR --seconds 240

Owns the packing and the shard files (`shard-WW-NNNN.npy`, uint16 [rows, LENGTH + 1]), each of
which appears whole or not at all. A row is one conversation cut at LENGTH + 1 tokens: it starts at
position 0 as a real conversation does, and goes on with further turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from anabranch.demo import chat, problems
from training.tokenizer import ASSISTANT, BEGIN, END, PACKAGE, SYSTEM, USER

LENGTH = 384
ROWS = 1024
SUMS, TURNS, SYSTEM_SHARE, BARE_SHARE = 0.08, 0.03, 0.06, 0.05


def exchanges(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (user text, answer) of the training split."""
    rng = random.Random(seed)
    stories, bare, talk = problems.problems("train", None, seed), chat.sums(seed), chat.turns(seed)
    while True:
        kind = rng.random()
        if kind < SUMS:
            operands, question, answer = next(bare)
            if not problems.kept_numbers(operands):
                yield question, answer
        elif kind < SUMS + TURNS:
            yield next(talk)
        else:
            problem = next(stories)
            yield problem.question, problem.solution


def rows(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Endless rows of LENGTH + 1 ids."""
    rng = random.Random(-seed)
    source = exchanges(seed)
    begin, end, user, assistant, system = (
        tokenizer.token_to_id(name) for name in (BEGIN, END, USER, ASSISTANT, SYSTEM)
    )
    prompts = [tokenizer.encode(text).ids for text in chat.SYSTEM_PROMPTS]
    row: list[int] = []
    while True:
        pairs = [next(source) for _ in range(256)]
        asked = tokenizer.encode_batch_fast([question for question, _ in pairs])
        told = tokenizer.encode_batch_fast([answer for _, answer in pairs])
        for question, answer in zip(asked, told, strict=True):
            if not row:
                row = [] if rng.random() < BARE_SHARE else [begin]
                if rng.random() < SYSTEM_SHARE:
                    row += [system, *rng.choice(prompts)]
            row += [user, *question.ids, assistant, *answer.ids, end]
            if len(row) > LENGTH:
                yield row[: LENGTH + 1]
                row = []


def work(worker: int, out: Path, seconds: float, seed: int) -> None:
    """Writes shards until the time is over."""
    tokenizer = Tokenizer.from_file(str(PACKAGE / "tokenizer.json"))
    source = rows(tokenizer, 1 + worker + 1000 * seed)
    stop, shard = time.monotonic() + seconds, 0
    while time.monotonic() < stop:
        block = np.array([next(source) for _ in range(ROWS)], dtype=np.uint16)
        path = out / f"shard-{worker:02d}-{shard:04d}.npy"
        with path.with_suffix(".part").open("wb") as file:
            np.save(file, block)
        path.with_suffix(".part").rename(path)
        shard += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 5))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.workers < 1:
        raise SystemExit(f"--workers {options.workers}: at least 1")
    print(f"{options.workers} data workers for {options.seconds:.0f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    workers = [
        multiprocessing.Process(target=work, args=(i, options.out, options.seconds, options.seed))
        for i in range(options.workers)
    ]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    if any(process.exitcode for process in workers):
        raise SystemExit("a data worker failed")


if __name__ == "__main__":
    main()
