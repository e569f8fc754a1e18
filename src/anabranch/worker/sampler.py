"""From logits to tokens, batched, and what is reported about them.

Every rank of a replica runs this from equal bytes, so all know the token with no further
collective. A row's random number is a function of (seed, position) alone. Logprobs are of the
unmodified distribution. Order of the filters: temperature, top_k, top_p (of what top_k left),
min_p.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.plan import (
    NOT_A_TOKEN,
    Chunks,
    Join,
    Phase,
    ReplicaPlan,
    ReplicaResult,
    TokenLogprobs,
)
from anabranch.core.request import SamplingParams
from anabranch.worker.seats import Seats


@dataclass(frozen=True)
class Drawn:
    """Seats that drew, their tokens int64 [n] on the device, and the logits row of each.

    finite: bool [n]; False where the logits have no highest that is a number, so that the token
    means nothing.
    """

    seat: tuple[int, ...]
    token: Tensor
    row: tuple[int, ...]
    finite: Tensor


@dataclass(frozen=True)
class _Picked:
    """A chunk with logits: rows [low, high) of the picked logits end at its last row."""

    chunks: Chunks
    index: int
    low: int
    high: int

    @property
    def seat(self) -> int:
        return int(self.chunks.seat[self.index])

    @property
    def draws(self) -> bool:
        return bool(self.chunks.sample[self.index])

    @property
    def next_position(self) -> int:
        return int(self.chunks.start[self.index] + self.chunks.count[self.index])


def _picked(plan: ReplicaPlan) -> Iterator[_Picked]:
    """Chunks with logits, in the order of the picked rows."""
    at = 0
    for phase in Phase:
        chunks = plan.chunks(phase)
        for i in np.flatnonzero(chunks.logits):
            n = 1 if chunks.logits[i] == 1 else int(chunks.count[i])
            yield _Picked(chunks, int(i), at, at + n)
            at += n


class Sampler:
    """Draws one token for every chunk that samples and keeps it in the token table."""

    def draw(self, plan: ReplicaPlan, logits: Tensor, seats: Seats) -> Drawn:
        """logits fp32 [picked rows, vocab]."""
        drawing = [p for p in _picked(plan) if p.draws]
        joins = [seats.joined[p.seat] for p in drawing]
        rows = [p.high - 1 for p in drawing]
        if not drawing:
            none = logits.new_zeros(0, dtype=torch.int64)
            return Drawn((), none, (), none.bool())
        chosen = logits if len(rows) == len(logits) else logits[rows]
        chosen = _without_early_stops(chosen, drawing, joins)
        tokens = chosen.argmax(-1)  # of a row with NaN, where that is
        finite = chosen.gather(1, tokens.unsqueeze(1)).isfinite().squeeze(1)
        random = [i for i, join in enumerate(joins) if join.sampling.temperature > 0]
        if random:
            where = torch.tensor(random, device=logits.device)
            uniform = _uniform(
                [joins[i].seed for i in random], [drawing[i].next_position for i in random]
            )
            tokens[where] = _sample(
                chosen[where], [joins[i] for i in random], torch.from_numpy(uniform)
            )
        seat = tuple(p.seat for p in drawing)
        seats.tokens[list(seat)] = tokens
        return Drawn(seat, tokens, tuple(rows), finite)


def _without_early_stops(logits: Tensor, drawing: list[_Picked], joins: list[Join]) -> Tensor:
    """Ids that would end a request before its min_tokens cannot be drawn."""
    early = [
        i
        for i, (p, join) in enumerate(zip(drawing, joins, strict=True))
        if p.next_position - join.prompt_len < join.sampling.min_tokens and join.stop_ids
    ]
    if early:
        logits = logits.clone()
        for i in early:
            logits[i, list(joins[i].stop_ids)] = -torch.inf
    return logits


def _uniform(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """[0, 1) from (seed, position): two rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    state = np.array([s & (2**64 - 1) for s in seeds], np.uint64)
    with np.errstate(over="ignore"):
        for word in (np.uint64(0x9E3779B97F4A7C15), np.array(positions, np.uint64)):
            state = state + word * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    result: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _sample(logits: Tensor, joins: list[Join], uniform: Tensor) -> Tensor:
    """logits [n, V], uniform [n] -> ids [n] by inverting the cumulative distribution.

    Rows are taken together only with rows that are cut alike (unfiltered, or to the same top_k), so
    that a row's token does not depend on what shares its batch.
    """
    vocab = logits.shape[1]
    cuts: dict[int, list[int]] = {}
    for i, join in enumerate(joins):
        cuts.setdefault(_cut(join.sampling, vocab), []).append(i)
    if len(cuts) == 1:
        return _invert(logits, joins, uniform, *cuts)
    tokens = logits.new_zeros(len(joins), dtype=torch.int64)
    for kept, rows in cuts.items():
        tokens[rows] = _invert(logits[rows], [joins[i] for i in rows], uniform[rows], kept)
    return tokens


def _cut(params: SamplingParams, vocab: int) -> int:
    """How many ids of a row are sorted: 0 for none, where no filter is set."""
    if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
        return 0
    return min(params.top_k, vocab) if params.top_k > 0 else vocab


def _invert(logits: Tensor, joins: list[Join], uniform: Tensor, kept: int) -> Tensor:
    """`_sample` of rows whose `kept` likeliest ids are left by top_k; 0: no filter at all."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values = [getattr(join.sampling, name) for join in joins]
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

    ids: Tensor | None = None
    if kept:
        whole = kept == logits.shape[1]
        logits, ids = logits.sort(stable=True, descending=True) if whole else logits.topk(kept)
    # below the peak, in fp64: however small the temperature, the likeliest id stays finite
    below = (logits - logits.amax(-1, keepdim=True)).double()
    probs = (below / column("temperature", torch.float64)).softmax(-1)
    if kept:
        dropped = probs.cumsum(-1) - probs >= column("top_p", torch.float64)
        dropped |= probs < column("min_p", torch.float64) * probs[:, :1]
        dropped[:, 0] = False
        probs = probs.masked_fill(dropped, 0.0)
    total = probs.cumsum(-1)
    target = uniform.to(total.device).unsqueeze(1) * total[:, -1:]
    index = torch.searchsorted(total, target, right=True).clamp_(max=probs.shape[1] - 1)
    return (index if ids is None else ids.gather(1, index)).squeeze(1)


def result_of(plan: ReplicaPlan, logits: Tensor, drawn: Drawn, seats: Seats) -> ReplicaResult:
    """What the leading rank reports: tokens, and what requests asked to know about
    distributions.
    """
    logprobs = {}
    for seat, row, token in zip(drawn.seat, drawn.row, drawn.token.tolist(), strict=True):
        count = seats.joined[seat].sampling.logprobs
        if count is not None:
            logprobs[seat] = token_logprobs(logits[row : row + 1], [token], count)[0]
    prompt: dict[int, tuple[TokenLogprobs, ...]] = {}
    raw: dict[int, tuple[int, bytes]] = {}
    for p in _picked(plan):
        if p.chunks.logits[p.index] != 2:
            continue
        count = seats.joined[p.seat].sampling.prompt_logprobs
        if count is None:
            start = int(p.chunks.start[p.index])
            raw[p.seat] = (start, logits[p.low : p.high].cpu().numpy().tobytes())
        else:
            following = _following(p)
            rows = logits[p.low : p.low + len(following)]
            prompt[p.seat] = tuple(token_logprobs(rows, following, count))
    tokens = torch.where(drawn.finite, drawn.token, NOT_A_TOKEN).cpu().numpy().astype(np.int32)
    return ReplicaResult(np.array(drawn.seat, np.int32), tokens, logprobs, prompt, raw)


def _following(p: _Picked) -> list[int]:
    """The known ids after each row of a chunk, as far as they are known."""
    first = int(p.chunks.count[: p.index].sum())
    ids = [int(t) for t in p.chunks.tokens[first + 1 : first + int(p.chunks.count[p.index])]]
    if len(p.chunks.after) and p.chunks.after[p.index] >= 0:
        ids.append(int(p.chunks.after[p.index]))
    return ids


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """logits fp32 [n, V] and the token of each row -> its logprob, rank and the `count` best."""
    if not tokens:
        return []
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    best = [
        list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [
        TokenLogprobs(token, value, rank, tuple(top))
        for token, value, rank, top in zip(
            tokens, own.squeeze(1).tolist(), ranks, best, strict=True
        )
    ]
