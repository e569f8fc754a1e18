"""Every check of a combination of settings, in one table: a `RunConfig`, or a `Refusal` with numbers.

Runs before any process starts and imports no torch. What passes here must run and must give one
process's answer; what cannot is refused here and nowhere later.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import log2

from anabranch.core.arch import GQA, Arch, SharedKV
from anabranch.core.config import EngineConfig
from anabranch.layout.choice import Layout
from anabranch.layout.mesh import Mesh
from anabranch.layout.ownership import Stripes


@dataclass(frozen=True)
class Machine:
    """What `device.probe` found. memory: bytes this process tree may use; cores it may run on."""

    device: str = "cpu"
    memory: int = 8 << 30
    cores: int = 1
    bf16: bool = True
    gpus: int = 0


@dataclass(frozen=True)
class RunConfig:
    """All choices made. Sizes in tokens; kv_pages per replica; kv_width elements per rank and layer."""

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
    def kv_bytes_per_token(self) -> float:
        """Bytes of cached rows per token on each rank."""
        size = 4 if self.kv_dtype == "float32" else 2
        return self.arch.layers * self.kv_width * size / self.layout.stripes.count


@dataclass(eq=False)  # raising writes the traceback into it: it cannot be frozen
class Refusal(Exception):
    """Why a combination cannot run: a stable code, the numbers, and what would work."""

    code: str
    message: str
    numbers: Mapping[str, int | str] = field(default_factory=dict)
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" Nearest layout that runs: {self.nearest}." if self.nearest else ""
        return f"{self.message}{hint} [{self.code}]"


@dataclass(frozen=True)
class Ask:
    """A configuration with the sizes every check needs. P = R * C * A ranks, N = C * S stripes."""

    config: EngineConfig
    arch: Arch

    @property
    def A(self) -> int:  # noqa: N802 - the contract's letter
        return self.config.tp // (self.config.attn_dp * self.config.attn_cp)

    @property
    def N(self) -> int:  # noqa: N802
        c = self.config
        if c.dcp is not None:
            return c.dcp
        return 1 if c.kv == "replicated" else c.attn_cp

    @property
    def S(self) -> int:  # noqa: N802
        return self.N // self.config.attn_cp if self.N > 1 else 1

    @property
    def split_decode(self) -> bool:
        return self.config.decode_attn != "replicated"


Check = Callable[[Ask], tuple[str, Mapping[str, int | str]] | None]
CHECKS: dict[str, Check] = {}


def check(code: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[code] = function
        return function

    return register


@check("size_not_positive")
def _positive(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    names = ("tp", "attn_dp", "attn_cp", "ep", "dcp_interleave", "page_size", "prefill_chunk",
             "workspace_tokens", "max_running", "max_waiting")  # fmt: skip
    for name in (*names, "dcp", "max_model_len", "kv_pages", "threads"):
        value = getattr(a.config, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {value}.", {name: value}
    return None


@check("world_not_product")
def _world(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    c = a.config
    if c.tp % (c.attn_dp * c.attn_cp):
        return (
            f"--tp {c.tp} is the number of ranks of a model copy; --attn-dp {c.attn_dp} times "
            f"--attn-cp {c.attn_cp} must divide it.",
            {"tp": c.tp, "attn_dp": c.attn_dp, "attn_cp": c.attn_cp},
        )
    return None


@check("kv_contradiction")
def _kv_flags(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    c = a.config
    if c.kv == "replicated" and c.dcp not in (None, 1):
        return f"--kv replicated means --dcp 1, but --dcp {c.dcp} was given.", {"dcp": c.dcp or 0}
    if c.kv == "striped" and a.N == 1:
        return (
            "--kv striped needs stripes, but there is one: "
            f"--attn-cp {c.attn_cp}, --dcp {c.dcp if c.dcp is not None else 'not given'}.",
            {"attn_cp": c.attn_cp, "dcp": a.N},
        )
    return None


@check("stripes_not_legal")
def _stripes(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    legal = legal_stripes(a.config.attn_cp, a.A)
    if a.N not in legal:
        return (
            f"--dcp {a.N} is the number of KV stripes of a replica; with --attn-cp "
            f"{a.config.attn_cp} and {a.A} attention-TP ranks it can be {_listed(legal)}. A stripe "
            "group cannot cross a replica.",
            {"dcp": a.N, "attn_cp": a.config.attn_cp, "attn_tp": a.A},
        )
    return None


@check("decode_tp_needs_cp")
def _decode_tp(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    if a.config.decode_attn == "tp" and a.config.attn_cp == 1:
        return (
            "--decode-attn tp cuts decode heads over the context-parallel ranks; with --attn-cp 1 "
            "there are none, and heads are cut over the attention-TP ranks already.",
            {"attn_cp": 1},
        )
    return None


@check("decode_replicated_needs_cp")
def _decode_replicated(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    if a.config.decode_attn == "replicated" and a.config.attn_cp == 1:
        return "--decode-attn replicated needs --attn-cp above 1.", {"attn_cp": 1}
    if not a.split_decode and a.S > 1:
        return (
            f"--decode-attn replicated keeps stripes within the {a.config.attn_cp} context-parallel "
            f"ranks: --dcp can be 1 or {a.config.attn_cp}, not {a.N}.",
            {"dcp": a.N, "attn_cp": a.config.attn_cp},
        )
    return None


@check("heads_not_divisible")
def _heads(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    cut = a.A * (a.config.attn_cp if a.split_decode else 1)
    if a.arch.heads % cut:
        return (
            f"{a.arch.heads} query heads cannot be cut over {cut} ranks "
            f"({a.A} attention TP x {cut // a.A} context parallel in decode).",
            {"heads": a.arch.heads, "ranks": cut},
        )
    return None


@check("output_group_cut")
def _output_groups(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    attn = a.arch.attn
    if not isinstance(attn, SharedKV):
        return None
    for ranks in (a.A, a.A * (a.config.attn_cp if a.split_decode else 1)):
        held = attn.heads // ranks
        if held % attn.group and attn.group % held:
            return (
                f"{ranks} ranks would hold {held} heads each, which cuts output groups of "
                f"{attn.group} heads unevenly; one number must divide the other.",
                {"heads": attn.heads, "ranks": ranks, "group": attn.group},
            )
    return None


@check("kv_heads_not_divisible")
def _kv_heads(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    th, kv = a.A // a.S, a.arch.kv_heads
    if isinstance(a.arch.attn, GQA) and kv % th and th % kv:
        return (
            f"{kv} KV heads can neither be cut over nor replicated on {th} ranks; one number must "
            "divide the other.",
            {"kv_heads": kv, "ranks": th},
        )
    return None


@check("kv_group_split")
def _kv_groups(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    th, kv = a.A // a.S, a.arch.kv_heads
    if isinstance(a.arch.attn, GQA) and th > kv and a.arch.heads % th:
        return f"{a.arch.heads} heads cannot be cut over {th} ranks.", {"ranks": th}
    return None


@check("stripes_gain_nothing")
def _gain(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    if a.config.force or a.S == 1:
        return None
    whole, striped = kv_per_rank(a.arch, a.A), kv_per_rank(a.arch, a.A // a.S)
    if a.S * whole <= striped:
        return (
            f"{a.S} stripes over attention-TP ranks save no KV memory: each rank would store "
            f"{striped} KV heads of 1/{a.S} of the positions instead of {whole} of all. "
            "--force accepts it.",
            {"kv_heads": a.arch.kv_heads, "attn_tp": a.A, "stripes": a.S},
        )
    return None


@check("experts")
def _experts(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    c = a.config
    if c.tp % c.ep:
        return f"--ep {c.ep} must divide the {c.tp} ranks.", {"ep": c.ep, "tp": c.tp}
    if a.arch.moe is None:
        if c.ep > 1 or c.moe_dispatch == "a2a":
            flag = f"--ep {c.ep}" if c.ep > 1 else "--moe-dispatch a2a"
            return f"{flag}: the model has no experts.", {"ep": c.ep}
        return None
    if a.arch.moe.experts < c.ep:
        return (
            f"--ep {c.ep} exceeds the model's {a.arch.moe.experts} experts.",
            {"ep": c.ep, "experts": a.arch.moe.experts},
        )
    width = a.arch.moe.width // (c.tp // c.ep)
    if width < 1:
        return f"experts of width {a.arch.moe.width} cannot be cut {c.tp // c.ep} ways.", {}
    return None


@check("exchange_form")
def _exchange(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    name = a.config.dcp_exchange
    if name == "auto":
        return None
    if a.N == 1:
        return f"--dcp-exchange {name}: the KV is not striped (--dcp 1), nothing is exchanged.", {}
    if (name == "lse") == a.split_decode:
        return (
            "--dcp-exchange lse is the exchange of --decode-attn replicated over stripes, and of "
            f"no other; the others need heads that have one owner. Asked: {name}.",
            {"exchange": name, "dcp": a.N},
        )
    return None


@check("queries_form")
def _queries(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    if a.config.dcp_q == "replicate" and (a.N == 1 or not a.split_decode):
        return "--dcp-q replicate needs striped KV and decode heads that have one owner.", {}
    return None


@check("context_parallel_choices")
def _cp_choices(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    for name in ("kv_to_q", "cp_split"):
        value = getattr(a.config, name)
        if value != "auto" and a.config.attn_cp == 1:
            flag = name.replace("_", "-")
            return f"--{flag} {value} is about context parallelism: --attn-cp is 1.", {}
    return None


@check("row_moves")
def _row_moves(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    c = a.config
    if c.residual == "replicated" and c.moe_dispatch == "a2a" and c.attn_dp > 1:
        return "--residual replicated gathers every row; --moe-dispatch a2a needs them sharded.", {}
    return None


@check("unknown_debug_switch")
def _unknown_debug(a: Ask) -> tuple[str, Mapping[str, int | str]] | None:
    unknown = a.config.debug_switches - {"poison", "trace", "checksum"}
    if unknown:
        return f"--debug knows poison, trace and checksum, not {_listed(sorted(unknown))}.", {}
    return None


def legal_stripes(cp: int, attn_tp: int) -> list[int]:
    """Stripe counts that a replica can have: 1, and cp * S with S dividing its attention TP."""
    return sorted({1} | {cp * s for s in range(1, attn_tp + 1) if attn_tp % s == 0})


def kv_per_rank(arch: Arch, ranks: int) -> int:
    """KV heads each of `ranks` ranks stores (one at least)."""
    return max(1, -(-arch.kv_heads // ranks))


def _listed(values: object) -> str:
    items = [str(v) for v in values] if isinstance(values, list | tuple) else [str(values)]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " or " + items[-1]


def refuse(config: EngineConfig, arch: Arch) -> Refusal | None:
    """The first check that fails, without looking for a nearest layout."""
    ask = Ask(config, arch)
    for code, function in CHECKS.items():
        found = function(ask)
        if found is not None:
            return Refusal(code, *found)
    return None


def nearest(config: EngineConfig, arch: Arch) -> str | None:
    """The layout flags closest to the asked ones that pass every check."""

    def distance(other: EngineConfig) -> float:
        pairs = (("tp", 4.0), ("attn_dp", 1.0), ("attn_cp", 1.0), ("dcp", 0.5), ("ep", 0.25))
        total = 0.0
        for name, weight in pairs:
            mine, theirs = getattr(config, name) or 1, getattr(other, name) or 1
            total += weight * abs(log2(max(mine, 1)) - log2(theirs))
        return total

    passing = [c for c in _around(config) if refuse(c, arch) is None]
    if not passing:
        return None
    best = min(passing, key=distance)
    flags = f"--tp {best.tp} --attn-dp {best.attn_dp} --attn-cp {best.attn_cp} --dcp {best.dcp}"
    return flags if best.ep == 1 else f"{flags} --ep {best.ep}"


def _around(config: EngineConfig) -> Iterator[EngineConfig]:
    sizes = [n for n in range(1, max(config.tp, 1) + 1) if n <= 16 or n == config.tp]
    for tp in sizes:
        divisors = [d for d in range(1, tp + 1) if tp % d == 0]
        for dp, cp in product(divisors, divisors):
            if tp % (dp * cp):
                continue
            plain = replace(
                config, tp=tp, attn_dp=dp, attn_cp=cp, kv=None, decode_attn=None,
                dcp_exchange="auto", dcp_q="auto", kv_to_q="auto", cp_split="auto",
            )  # fmt: skip
            for stripes in legal_stripes(cp, tp // (dp * cp)):
                for ep in {1, config.ep}:
                    yield replace(plain, dcp=stripes, ep=ep)


def resolve(config: EngineConfig, arch: Arch, machine: Machine) -> RunConfig:
    """Make every choice. Raises Refusal (with the nearest layout that runs) if it cannot run."""
    refusal = refuse(config, arch)
    if refusal is not None:
        raise replace(refusal, nearest=nearest(config, arch))
    ask = Ask(config, arch)
    notes: list[str] = []
    cycle = ask.N * config.dcp_interleave
    page = -(-config.page_size // cycle) * cycle
    if page != config.page_size:
        notes.append(f"page size {config.page_size} -> {page}: a multiple of {cycle} stripes")
    layout = _layout(ask, page)
    dtype = config.dtype
    if dtype == "auto":
        dtype = arch.dtype if machine.device == "cuda" or machine.bf16 else "float32"
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    own = layout.ownership(arch.heads, arch.kv_heads)
    width = arch.attn.entry(len(own.kv_range(0)))
    length = min(config.max_model_len or arch.max_len, arch.max_len)
    run = RunConfig(
        config, arch, layout, machine.device, dtype, kv_dtype, length, 0,
        config.threads or max(1, machine.cores // config.tp), width,
    )  # fmt: skip
    pages = config.kv_pages or _pages(run, machine, notes)
    fits = pages * page
    if config.max_model_len is None and fits < length:
        notes.append(f"context length {length} -> {fits}: what the KV memory holds")
        run = replace(run, max_model_len=fits)
    return replace(run, kv_pages=pages, notes=tuple(notes))


def _layout(a: Ask, page: int) -> Layout:
    c = a.config

    def pick(name: str, default: str) -> str:
        value: str = getattr(c, name)
        return default if value == "auto" else value

    sharded = pick("moe_dispatch", "gather") == "a2a" or c.attn_dp > 1 or c.attn_cp > 1
    return Layout(
        mesh=Mesh(c.attn_dp, c.attn_cp, a.A // a.S, a.S),
        stripes=Stripes(a.N, c.dcp_interleave, page),
        split_decode=a.split_decode,
        ep=c.ep,
        residual=pick("residual", "sharded" if sharded else "replica"),
        embedding=pick("embedding", "whole"),
        lm_head=pick("lm_head", "replica"),
        shared_experts=pick("shared_experts", "sharded"),
        row_moves=pick("row_moves", "v"),
        moe_dispatch=pick("moe_dispatch", "gather"),
        cp_split=pick("cp_split", "zigzag"),
        kv_to_q=pick("kv_to_q", "gather"),
        dcp_exchange=pick("dcp_exchange", "a2a" if a.split_decode else "lse"),
        dcp_q=pick("dcp_q", "gather"),
    )


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """ "2GiB", "512M" or "1000" -> bytes. ValueError otherwise."""
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        return int(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a size; write 2GiB, 512MiB or bytes") from None


def _pages(run: RunConfig, machine: Machine, notes: list[str]) -> int:
    """KV pages of a replica: from --kv-memory, or from what weights leave of the machine's memory."""
    config = run.config
    per_page = max(1, int(run.kv_bytes_per_token * run.page_size))
    ranks = config.tp if machine.device == "cpu" else 1
    size = 4 if run.dtype == "float32" else 2
    weights = weight_elements(run.arch) * size
    if config.kv_memory is None:
        budget = max(0, int((machine.memory - weights) * 0.6)) // ranks
    elif config.kv_memory.endswith("%"):
        # other engines' share of memory: for weights and KV together
        share = parse_bytes(config.kv_memory[:-1]) / 100
        budget = max(0, int(machine.memory * share) - weights) // ranks
    else:
        budget = parse_bytes(config.kv_memory)
    needed = config.max_running * -(-run.max_model_len // run.page_size)
    pages = min(budget // per_page, needed)
    if pages < 2:
        raise Refusal(
            "no_memory_for_kv",
            f"{budget} bytes for the KV of a rank hold {pages} pages of {per_page} bytes; "
            "at least 2 are needed: use a smaller model, more stripes or --kv-memory.",
            {"budget": budget, "bytes_per_page": per_page},
        )
    return pages


def weight_elements(arch: Arch) -> int:
    """Parameters of the whole model, near enough to size memory."""
    d = arch.hidden
    mixer = arch.attn.elements(d)
    total = arch.vocab * d * (1 if arch.tied else 2)
    for layer in range(arch.layers):
        moe = arch.moe
        if moe is not None and moe.is_moe(layer):
            ffn = 3 * d * (moe.experts * moe.width + moe.shared_width) + moe.experts * d
        else:
            ffn = 3 * d * arch.ffn_width
        total += mixer + ffn
    return total
