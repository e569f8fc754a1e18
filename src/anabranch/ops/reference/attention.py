"""References of attention: over a paged pool (decode) and over rows (prefill).

Owns their arithmetic in fp32 and what is refused. Knows neither ranks nor cache kinds; memory stays
bounded by taking query rows in blocks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Split = Callable[[Tensor], tuple[Tensor, Tensor]]  # pool entries -> keys, values per query head

BLOCK_ELEMENTS = 1 << 24  # fp32 elements of the largest temporary of one block of query rows
INTEGERS = (torch.int32, torch.int64)
ATTENDED = (torch.float32, torch.bfloat16, torch.float16)


def attend_paged_gqa(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lens: Tensor,
    *,
    page_slots: int,
    kv_map: Tensor,
    scale: float,
    start: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``signatures.AttendPaged``: entries are [2, kv_heads, D]."""
    check_paged("attend_paged_gqa", q, pool, page_table, lens, page_slots, start, sink)
    width = q.shape[2]
    if pool.shape[1] == 0 or pool.shape[1] % (2 * width):
        raise ValueError(
            f"attend_paged_gqa: an entry of {pool.shape[1]} elements is not [2, kv_heads, {width}]"
        )
    check_map("attend_paged_gqa", kv_map, q.shape[1], pool.shape[1] // (2 * width))
    heads, stored = kv_map.long(), pool.shape[1] // (2 * width)

    def split(entries: Tensor) -> tuple[Tensor, Tensor]:
        kv = entries.view(*entries.shape[:-1], 2, stored, width)
        return kv[..., 0, :, :].index_select(-2, heads), kv[..., 1, :, :].index_select(-2, heads)

    return _attend_paged(q, pool, page_table, lens, page_slots, scale, start, sink, width, split)


def attend_paged_mla(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lens: Tensor,
    *,
    page_slots: int,
    value_width: int,
    scale: float,
    start: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``signatures.AttendPagedMla``: an entry is its own key, its first elements the value."""
    check_paged("attend_paged_mla", q, pool, page_table, lens, page_slots, start, sink)
    if q.shape[2] != pool.shape[1] or not 0 < value_width <= pool.shape[1]:
        raise ValueError(
            f"attend_paged_mla: q is {q.shape[2]} wide, entries {pool.shape[1]}, the value "
            f"{value_width}; q and entries must be alike, the value within them"
        )

    def split(entries: Tensor) -> tuple[Tensor, Tensor]:
        one_head = entries.unsqueeze(-2)
        return one_head, one_head[..., :value_width]

    return _attend_paged(
        q, pool, page_table, lens, page_slots, scale, start, sink, value_width, split
    )


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    kv_map: Tensor,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``signatures.AttendRows``."""
    check_rows(q, k, v, q_pos, k_pos, window, sink)
    check_map("attend_rows", kv_map, q.shape[1], k.shape[1])
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, v.shape[2])
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    block = max(1, BLOCK_ELEMENTS // max(1, heads * k.shape[0]))
    for at in range(0, rows, block):
        to = slice(at, min(at + block, rows))
        seen = k_pos[None, :] <= q_pos[to, None]
        if window is not None:
            seen &= k_pos[None, :] > q_pos[to, None] - window
        some = seen.any(0).nonzero()[:, 0]  # what no row sees is not touched: it may be NaN
        keys = k.index_select(0, some)[:, kv_map.long()].float()
        values = v.index_select(0, some)[:, kv_map.long()].float()
        score = torch.einsum("thd,shd->ths", q[to].float(), keys) * scale
        weight, lse[to] = _softmax(score, seen.index_select(1, some)[:, None], sink)
        out[to] = torch.einsum("ths,shd->thd", weight, values).to(q.dtype)
    return out, lse


def _attend_paged(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lens: Tensor,
    page_slots: int,
    scale: float,
    start: Tensor | None,
    sink: Tensor | None,
    value_width: int,
    split: Split,
) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, value_width)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    longest = int(lens.max()) if rows else 0
    entry = torch.arange(longest, device=q.device)
    first = torch.zeros_like(lens) if start is None else start
    block = max(1, BLOCK_ELEMENTS // max(1, longest * max(pool.shape[1], heads * q.shape[2])))
    for at in range(0, rows, block):
        to = slice(at, min(at + block, rows))
        seen = (entry >= first[to, None]) & (entry < lens[to, None])
        page = page_table[to].long().gather(1, (entry // page_slots).expand_as(seen))
        pages = pool.shape[0] // page_slots
        if bool((seen & ((page < 0) | (page >= pages))).any()):
            raise ValueError(f"a visible entry's page is outside the pool's {pages} pages")
        slot = torch.where(seen, page * page_slots + entry % page_slots, 0)
        entries = torch.where(seen[..., None], pool[slot].float(), 0.0)  # unseen slots may be NaN
        keys, values = split(entries)
        score = torch.einsum("thd,tshd->ths", q[to].float(), keys.expand(-1, -1, heads, -1)) * scale
        weight, lse[to] = _softmax(score, seen[:, None], sink)
        values = values.expand(-1, -1, heads, -1)
        out[to] = torch.einsum("ths,tshd->thd", weight, values).to(q.dtype)
    return out, lse


def _softmax(score: Tensor, seen: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [T, H, S] over the seen keys and their lse [T, H]; nothing seen: (0, -inf)."""
    score = score.masked_fill(~seen, -math.inf)
    if sink is not None:
        column = sink.to(score.dtype)[None, :, None].expand(*score.shape[:2], 1)
        lse = torch.logsumexp(torch.cat((score, column), -1), -1)
    elif score.shape[-1]:
        lse = torch.logsumexp(score, -1)
    else:
        lse = score.new_full(score.shape[:-1], -math.inf)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    return torch.exp(score - shift[..., None]), lse


def check_paged(
    op: str,
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lens: Tensor,
    page_slots: int,
    start: Tensor | None,
    sink: Tensor | None,
) -> None:
    """Refuse what neither paged form takes."""
    if q.dim() != 3 or pool.dim() != 2 or page_table.dim() != 2:
        raise ValueError(
            f"{op}: q, pool, page_table have {q.dim()}, {pool.dim()}, {page_table.dim()} dims; "
            "they must have 3, 2, 2"
        )
    _check_values(op, q, pool)
    rows = q.shape[0]
    for name, ints in (("page_table", page_table), ("lens", lens), ("start", start)):
        if ints is not None and (ints.shape[0] != rows or ints.dtype != torch.int32):
            raise ValueError(
                f"{op}: {name} is {tuple(ints.shape)} {ints.dtype}, int32 for {rows} rows is needed"
            )
    longest = int(lens.max()) if rows else 0
    if start is not None and rows and int(start.min()) < 0:
        raise ValueError(f"{op}: start {int(start.min())}; the first entry is 0")
    if page_slots < 1 or longest > page_table.shape[1] * page_slots:
        raise ValueError(
            f"{op}: {longest} entries do not fit {page_table.shape[1]} pages of {page_slots} slots"
        )
    check_sink(op, sink, q.shape[1])


def check_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    window: int | None,
    sink: Tensor | None,
) -> None:
    """Refuse what ``attend_rows`` does not take."""
    op = "attend_rows"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"{op}: q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dims; they must have 3"
        )
    _check_values(op, q, k, v)
    if q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{op}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; they must be "
            "[T, H, Dq], [S, kv_heads, Dq], [S, kv_heads, Dv]"
        )
    if q_pos.shape != q.shape[:1] or k_pos.shape != k.shape[:1]:
        raise ValueError(
            f"{op}: q_pos {tuple(q_pos.shape)}, k_pos {tuple(k_pos.shape)}; one position per row "
            f"is needed, [{q.shape[0]}] and [{k.shape[0]}]"
        )
    if q_pos.dtype not in INTEGERS or k_pos.dtype not in INTEGERS:
        raise ValueError(f"{op}: q_pos is {q_pos.dtype}, k_pos {k_pos.dtype}; use int32 or int64")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window {window}; a row sees itself, so at least 1 is needed")
    check_sink(op, sink, q.shape[1])


def check_map(op: str, kv_map: Tensor, heads: int, kv_heads: int) -> None:
    """Refuse a map that does not give each query head one of the KV heads."""
    if kv_map.shape != (heads,) or kv_map.dtype != torch.int32:
        raise ValueError(
            f"{op}: kv_map is {tuple(kv_map.shape)} {kv_map.dtype}; it must be int32 [{heads}]"
        )
    if heads and not 0 <= int(kv_map.min()) <= int(kv_map.max()) < kv_heads:
        raise ValueError(
            f"{op}: kv_map {kv_map.tolist()} names a KV head outside 0..{kv_heads - 1}"
        )


def check_sink(op: str, sink: Tensor | None, heads: int) -> None:
    """Refuse a sink that is not one fp32 logit per head."""
    if sink is not None and (sink.shape != (heads,) or sink.dtype != torch.float32):
        raise ValueError(
            f"{op}: sink is {tuple(sink.shape)} {sink.dtype}; it must be float32 [{heads}]"
        )


def _check_values(op: str, q: Tensor, *others: Tensor) -> None:
    if q.dtype not in ATTENDED or any(t.dtype != q.dtype for t in others):
        raise ValueError(
            f"{op}: q is {q.dtype}, what it attends to {[t.dtype for t in others]}; all must be of "
            f"one dtype, one of {ATTENDED}"
        )
    for t in (q, *others):
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{op}: a last dim has stride {t.stride(-1)}; it must be 1")
