"""What a step's result means for its requests: tokens kept, requests ended, outputs to send.

Changes sequences only (tokens, collected logprobs, scored positions); who frees their pages is
replica.py's business. A row whose sequence has ended meanwhile is dropped here.
"""

from anabranch.core.messages import Output
from anabranch.core.plan import NOT_A_TOKEN, ReplicaResult
from anabranch.sched.state import ReplicaFlight, Sequence


def collect(flight: ReplicaFlight, result: ReplicaResult) -> list[tuple[Sequence, Output]]:
    """Outputs of one replica's step; those with a finish_reason end their request."""
    seats, drawn = result.seat.tolist(), result.token.tolist()
    assert seats == flight.seats.tolist(), (
        f"drew for seats {seats}, planned {flight.seats.tolist()}"
    )
    outputs = []
    for chunk in flight.chunks:
        if chunk.seq.ended:
            continue
        if (entries := result.prompt_logprobs.get(chunk.seq.seat)) is not None:
            chunk.seq.prompt_logprobs += entries
        if chunk.seq.scoring and (piece := result.logits.get(chunk.seq.seat)) is not None:
            outputs.append((chunk.seq, _scored(chunk.seq, chunk.end, piece)))
    for seq, seat, token in zip(flight.drawing, seats, drawn, strict=True):
        if not seq.ended:
            outputs.append((seq, _drawn(seq, seat, token, result)))
    return outputs


def _drawn(seq: Sequence, seat: int, token: int, result: ReplicaResult) -> Output:
    if token == NOT_A_TOKEN:
        return Output(
            seq.request.id,
            finish_reason="error",
            cached_tokens=seq.cached_tokens,
            error=f"the model's logits at position {len(seq.tokens) - 1} are not finite numbers: "
            "its weights are damaged, or its values leave the range of the dtype it runs in",
        )
    prompt_logprobs = None
    if seq.wants_prompt_logprobs:
        prompt_logprobs = tuple(seq.prompt_logprobs)
        assert len(prompt_logprobs) == seq.prompt_len - 1, (
            f"{len(prompt_logprobs)} prompt logprobs for a prompt of {seq.prompt_len} tokens"
        )
        seq.prompt_logprobs = []
    seq.tokens.append(token)
    stops = token in seq.stop_ids
    length = len(seq.tokens) >= seq.limit
    return Output(
        seq.request.id,
        (token,),
        () if seq.request.sampling.logprobs is None else (result.logprobs[seat],),
        prompt_logprobs,
        "stop" if stops else "length" if length else None,
        token if stops else None,
        seq.cached_tokens,
    )


def _scored(seq: Sequence, end: int, piece: tuple[int, bytes]) -> Output:
    assert piece[0] == seq.scored, f"logits from position {piece[0]}, wanted {seq.scored}"
    seq.scored = end
    reason = "length" if end == seq.prompt_len else None
    return Output(seq.request.id, finish_reason=reason, logits=(piece,))
