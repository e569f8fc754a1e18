"""From what the user asked to a `RunConfig` with every choice made, or a `Refusal` with numbers.

Runs before any process starts and imports no torch. What may be combined is said in `core.checks`;
here defaults are filled in, automatic choices made from the table of costs, and memory is sized.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from anabranch.core.abilities import partial_width, query_width
from anabranch.core.arch import GQA, MLA, Arch
from anabranch.core.ask import Ask, Machine, Refusal
from anabranch.core.capacity import kv_budget, kv_pages, weight_elements
from anabranch.core.checks import legal_stripes, refuse
from anabranch.core.config import EngineConfig
from anabranch.core.nearest import nearest
from anabranch.layout import decide
from anabranch.layout.choice import Layout
from anabranch.layout.costs import SHIPPED, Costs
from anabranch.layout.mesh import Mesh
from anabranch.layout.ownership import Stripes

__all__ = ["Machine", "Refusal", "RunConfig", "legal_stripes", "refuse", "resolve"]

NOMINAL_ROWS = 8
"""Decode rows of a replica for which choices that hold for a whole run are made."""


@dataclass(frozen=True)
class RunConfig:
    """All choices made. Sizes in tokens; kv_pages per replica; kv_width elements of a rank's
    row.
    """

    config: EngineConfig
    arch: Arch
    layout: Layout
    device: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    kv_pages: int
    threads: int
    kv_width: int
    notes: tuple[str, ...] = ()

    @property
    def page_size(self) -> int:
        return self.layout.stripes.page

    @property
    def round_tokens(self) -> int:
        """Cached positions brought to the queries of prefill at a time: a workspace, on CPU at most
        as many as caches keep with the keys and values computed of them."""
        tokens = self.config.workspace_tokens
        return min(tokens, 2048) if self.device == "cpu" else tokens

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of cached rows per token on each rank."""
        return (
            self.arch.layers * self.kv_width * itemsize(self.kv_dtype) / self.layout.stripes.count
        )


def itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def resolve(
    config: EngineConfig,
    arch: Arch,
    machine: Machine,
    costs_of: Callable[[str], Costs] = SHIPPED.__getitem__,
) -> RunConfig:
    """Make every choice. costs_of: the table of a transport, shipped or calibrated.

    Raises Refusal (with the nearest layout that runs) if it cannot run.
    """
    refusal = refuse(config, arch, machine)
    if refusal is not None:
        raise replace(refusal, nearest=nearest(config, arch, machine))
    ask = Ask(config, arch, machine)
    notes: list[str] = []
    cycle = ask.N * config.dcp_interleave
    page = -(-config.page_size // cycle) * cycle
    if page != config.page_size:
        notes.append(f"page size {config.page_size} -> {page}: a multiple of {cycle} stripes")
    layout = _layout(ask, page, costs_of(ask.transport))
    own = layout.ownership(arch.heads, arch.kv_heads)
    run = RunConfig(
        config=config,
        arch=arch,
        layout=layout,
        device=machine.device,
        dtype=ask.dtype,
        kv_dtype=ask.kv_dtype,
        max_model_len=config.max_model_len or arch.max_len,
        kv_pages=config.kv_pages or 0,
        threads=config.threads or max(1, machine.cores // config.tp),
        kv_width=arch.attn.entry(len(own.kv_range(0))),
    )
    return replace(_sized(run, machine, notes), notes=tuple(notes))


def _sized(run: RunConfig, machine: Machine, notes: list[str]) -> RunConfig:
    """The run with its pages, and with a context length that they hold."""
    pages = run.kv_pages
    page_bytes = int(run.kv_bytes_per_token * run.page_size)
    ranks = run.config.tp if machine.device == "cpu" else 1
    if pages * page_bytes * ranks > machine.memory:
        raise Refusal(
            "kv_above_memory",
            f"--kv-pages {pages}: {ranks} ranks with {pages} pages of {page_bytes} bytes each need "
            f"{pages * page_bytes * ranks} bytes; the machine has {machine.memory}, so at most "
            f"{machine.memory // max(1, page_bytes * ranks)} pages.",
            {"kv_pages": pages, "bytes_per_page": page_bytes, "memory": machine.memory},
        )
    if pages == 0:
        weights = weight_elements(run.arch) * itemsize(run.dtype)
        budget = kv_budget(run.config, machine, weights)
        pages = kv_pages(run.config, budget, page_bytes, run.page_size, run.max_model_len)
    fits, length = pages * run.page_size, run.max_model_len
    if fits < length and run.config.max_model_len is not None:
        raise Refusal(
            "kv_below_context",
            f"--max-model-len {length}: the KV memory of a replica holds {fits} tokens ({pages} "
            f"pages of {run.page_size}), so no request could use it; ask for at most {fits}, "
            "or use more stripes or more --kv-memory.",
            {"max_model_len": length, "kv_tokens": fits, "pages": pages},
        )
    if fits < length:
        notes.append(f"context length {length} -> {fits}: what the KV memory holds")
    return replace(run, kv_pages=pages, max_model_len=min(fits, length))


def _layout(a: Ask, page: int, costs: Costs) -> Layout:
    c = a.config

    def pick(name: str, otherwise: str) -> str:
        value: str = getattr(c, name)
        return otherwise if value == "auto" else value

    return Layout(
        mesh=Mesh(c.attn_dp, c.attn_cp, a.A // a.S, a.S),
        stripes=Stripes(a.N, c.dcp_interleave, page),
        split_decode=a.split_decode,
        ep=c.ep,
        residual=pick("residual", "auto" if c.tp > 1 else "sharded"),
        embedding=pick("embedding", "whole"),
        lm_head=pick("lm_head", "replica"),
        shared_experts=pick("shared_experts", "sharded"),
        row_moves=pick("row_moves", "auto" if c.tp > 1 else "v"),
        moe_dispatch=pick("moe_dispatch", "gather"),
        cp_split=pick("cp_split", "zigzag"),
        kv_to_q=pick("kv_to_q", _kv_to_q(a, costs)),
        dcp_exchange=pick("dcp_exchange", _route(a, costs)),
        dcp_q=pick("dcp_q", _queries(a, costs)),
        costs=costs,
    )


def _kv_to_q(a: Ask, costs: Costs) -> str:
    """How KV comes to the queries of prefill."""
    attn, entry = a.arch.attn, None
    if isinstance(attn, MLA):
        elements = attn.computed(attn.heads // a.A)
        entry = decide.Computed(elements * itemsize(a.dtype), 2 * elements * attn.kv_lora)
    c = a.config
    return decide.kv_to_q(c.attn_cp, c.prefill_chunk, c.workspace_tokens, entry, costs)


def _route(a: Ask, costs: Costs) -> str:
    """The exchange of decode: of partial outputs, or of the lse alone if decode is replicated."""
    if not a.split_decode:
        return "lse"
    heads = a.arch.heads // (a.A // a.S)
    bytes_of_head = partial_width(a.arch) * itemsize(a.dtype)
    return decide.exchange_route(NOMINAL_ROWS, bytes_of_head, heads, costs)


def _queries(a: Ask, costs: Costs) -> str:
    """Gathered, unless every member holds the weights of the group's queries anyway (S = 1) and
    reading them costs less than the gather."""
    if a.N == 1 or not a.split_decode or a.S > 1:
        return "gather"
    attn, size = a.arch.attn, itemsize(a.dtype)
    if isinstance(attn, MLA):
        source = attn.q_lora or a.arch.hidden
        head = source * (attn.nope + attn.rope) + attn.nope * attn.kv_lora
    else:
        head = attn.head_dim * (a.arch.hidden if isinstance(attn, GQA) else attn.q_lora)
    own = a.arch.heads // (a.A * a.config.attn_cp)
    return decide.queries(
        NOMINAL_ROWS, own * query_width(a.arch) * size, (a.N - 1) * own * head * size, costs
    )
