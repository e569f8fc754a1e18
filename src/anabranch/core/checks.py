"""Every check of a combination of settings, in one table: a `Refusal` with numbers, or none.

What passes here must run and must give one process's answer; what cannot is refused here, before
any process starts, and nowhere later. Owns codes and messages.
"""

from collections.abc import Callable

from anabranch.core.abilities import WORD, lacking, partial_width
from anabranch.core.arch import GQA, MLA, Arch, SharedKV
from anabranch.core.ask import Ask, Machine, Numbers, Refusal
from anabranch.core.capacity import parse_bytes
from anabranch.core.config import EngineConfig, flag_name
from anabranch.layout.costs import SHIPPED

Check = Callable[[Ask], tuple[str, Numbers] | None]
CHECKS: dict[str, Check] = {}
MOST_THREADS = MOST_RANKS = 1024
MOST_RUNNING = 16384


def check(code: str) -> Callable[[Check], Check]:
    """Register a check under its code. Checks run in this file's order; the first speaks."""

    def register(function: Check) -> Check:
        assert code not in CHECKS, code
        CHECKS[code] = function
        return function

    return register


# sizes and flags that contradict each other ------------------------------------------------------


@check("size_not_positive")
def _positive(a: Ask) -> tuple[str, Numbers] | None:
    names = ("tp", "attn_dp", "attn_cp", "ep", "dcp_interleave", "page_size", "prefill_chunk",
             "workspace_tokens", "max_running", "max_waiting", "dcp", "max_model_len", "kv_pages",
             "threads")  # fmt: skip
    for name in names:
        value = getattr(a.config, name)
        if value is not None and value < 1:
            return f"{flag_name(name)} must be at least 1, got {value}.", {name: value}
    return None


@check("ranks_too_many")
def _ranks(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.tp > MOST_RANKS:
        return (
            f"--tp {a.config.tp}: a model copy may have {MOST_RANKS} ranks.",
            {"tp": a.config.tp, "most": MOST_RANKS},
        )
    return None


@check("running_too_many")
def _running(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.max_running > MOST_RUNNING:
        return (
            f"--max-running {a.config.max_running}: a replica may run {MOST_RUNNING} requests at "
            "once.",
            {"max_running": a.config.max_running, "most": MOST_RUNNING},
        )
    return None


@check("seed_range")
def _seed(a: Ask) -> tuple[str, Numbers] | None:
    if not -(2**63) <= a.config.seed < 2**63:
        return f"--seed {a.config.seed} has more than 64 bits.", {"seed": str(a.config.seed)}
    return None


@check("threads_too_many")
def _threads(a: Ask) -> tuple[str, Numbers] | None:
    threads = a.config.threads or 1
    if threads > MOST_THREADS:
        return (
            f"--threads {threads}: a rank may have {MOST_THREADS}; this machine has "
            f"{a.machine.cores} cores.",
            {"threads": threads, "most": MOST_THREADS, "cores": a.machine.cores},
        )
    return None


@check("kv_memory_no_size")
def _kv_memory(a: Ask) -> tuple[str, Numbers] | None:
    try:
        parse_bytes((a.config.kv_memory or "0").removesuffix("%"))
    except ValueError as error:
        return f"--kv-memory {a.config.kv_memory}: {error}.", {"kv_memory": str(a.config.kv_memory)}
    return None


@check("share_above_all")
def _share(a: Ask) -> tuple[str, Numbers] | None:
    share = a.config.kv_memory or ""
    if share.endswith("%") and parse_bytes(share[:-1]) > 100:
        return f"--kv-memory {share}: a share of the memory is at most 100%.", {"kv_memory": share}
    return None


@check("world_not_product")
def _world(a: Ask) -> tuple[str, Numbers] | None:
    c = a.config
    if c.tp % (c.attn_dp * c.attn_cp):
        return (
            f"--tp {c.tp} is the number of ranks of a model copy; --attn-dp {c.attn_dp} times "
            f"--attn-cp {c.attn_cp} must divide it.",
            {"tp": c.tp, "attn_dp": c.attn_dp, "attn_cp": c.attn_cp},
        )
    return None


@check("device_ranks")
def _device(a: Ask) -> tuple[str, Numbers] | None:
    if a.machine.device == "cuda" and a.config.tp > a.machine.gpus:
        return (
            f"--tp {a.config.tp} needs a GPU per rank, and there are {a.machine.gpus}.",
            {"tp": a.config.tp, "gpus": a.machine.gpus},
        )
    return None


@check("transport_of_threads")
def _transport(a: Ask) -> tuple[str, Numbers] | None:
    c = a.config
    if c.ranks == "threads" and c.transport != "auto":
        return (
            f"--transport {c.transport} is between processes; --ranks threads meet in memory.",
            {"transport": c.transport},
        )
    return None


@check("unknown_debug_switch")
def _unknown_debug(a: Ask) -> tuple[str, Numbers] | None:
    unknown = a.config.debug_switches - {"poison", "trace", "checksum", "pad"}
    if unknown:
        return f"--debug knows poison, trace, checksum and pad, not {_listed(sorted(unknown))}.", {}
    return None


@check("kv_contradiction")
def _kv_flags(a: Ask) -> tuple[str, Numbers] | None:
    c = a.config
    if c.kv == "replicated" and c.dcp not in (None, 1):
        return f"--kv replicated means --dcp 1, but --dcp {c.dcp} was given.", {"dcp": c.dcp or 0}
    if c.kv == "striped" and a.N == 1:
        given = c.dcp if c.dcp is not None else "not given"
        return (
            f"--kv striped needs stripes, but there is one: --attn-cp {c.attn_cp}, --dcp {given}.",
            {"attn_cp": c.attn_cp, "dcp": a.N},
        )
    return None


# stripes -----------------------------------------------------------------------------------------


@check("stripes_cross_replicas")
def _crossing(a: Ask) -> tuple[str, Numbers] | None:
    replica = a.config.attn_cp * a.A
    if a.config.attn_dp > 1 and replica < a.N:
        return (
            f"--dcp {a.N} stripes do not fit the {replica} ranks of a replica (--tp {a.config.tp} "
            f"over --attn-dp {a.config.attn_dp}): a stripe group cannot cross replicas, whose "
            "requests differ.",
            {"dcp": a.N, "replica_ranks": replica, "attn_dp": a.config.attn_dp},
        )
    return None


@check("stripes_not_legal")
def _stripes(a: Ask) -> tuple[str, Numbers] | None:
    legal = legal_stripes(a.config.attn_cp, a.A)
    if a.N not in legal:
        return (
            f"--dcp {a.N} is the number of KV stripes of a replica, --attn-cp times a divisor of "
            f"its attention TP; with --attn-cp {a.config.attn_cp} and attention TP {a.A} it can be "
            f"{_listed(legal)}.",
            {"dcp": a.N, "attn_cp": a.config.attn_cp, "attn_tp": a.A},
        )
    return None


@check("stripes_gain_nothing")
def _gain(a: Ask) -> tuple[str, Numbers] | None:
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


@check("interleave_without_stripes")
def _interleave(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.dcp_interleave > 1 and a.N == 1 and a.config.attn_cp == 1:
        return (
            f"--dcp-interleave {a.config.dcp_interleave} is about stripes, and the KV is whole.",
            {"dcp_interleave": a.config.dcp_interleave, "dcp": 1},
        )
    return None


# decode forms and exchanges ----------------------------------------------------------------------


@check("decode_tp_needs_cp")
def _decode_tp(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.decode_attn == "tp" and a.config.attn_cp == 1:
        return (
            "--decode-attn tp cuts decode heads over the context-parallel ranks; with --attn-cp 1 "
            "there are none, and heads are cut over the attention-TP ranks already.",
            {"attn_cp": 1},
        )
    return None


@check("decode_replicated_needs_cp")
def _decode_replicated(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.decode_attn == "replicated" and a.config.attn_cp == 1:
        return (
            "--decode-attn replicated is about context-parallel ranks, and --attn-cp is 1.",
            {"attn_cp": 1},
        )
    return None


@check("decode_replicated_stripes")
def _decode_replicated_stripes(a: Ask) -> tuple[str, Numbers] | None:
    if not a.split_decode and a.S > 1:
        return (
            f"--decode-attn replicated keeps stripes within the {a.config.attn_cp} "
            f"context-parallel ranks: --dcp can be 1 or {a.config.attn_cp}, not {a.N}.",
            {"dcp": a.N, "attn_cp": a.config.attn_cp},
        )
    return None


@check("exchange_without_stripes")
def _exchange(a: Ask) -> tuple[str, Numbers] | None:
    name = a.config.dcp_exchange
    if name != "auto" and a.N == 1:
        return (
            f"--dcp-exchange {name}: the KV is whole on every rank (--dcp 1); nothing moves.",
            {"exchange": name, "dcp": 1},
        )
    return None


@check("exchange_form")
def _exchange_form(a: Ask) -> tuple[str, Numbers] | None:
    name = a.config.dcp_exchange
    if name != "auto" and (name == "lse") == a.split_decode:
        return (
            "--dcp-exchange lse is the exchange of --decode-attn replicated over stripes, and of "
            f"no other; the others need heads that have one owner. Asked: {name}.",
            {"exchange": name, "dcp": a.N},
        )
    return None


@check("exchange_transport")
def _exchange_transport(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.dcp_exchange == "fused" and not SHIPPED[a.transport].shared:
        return (
            f"--dcp-exchange fused needs memory that peers can address; {a.transport} has none: "
            "use --transport shm, or --dcp-exchange a2a.",
            {"exchange": "fused", "transport": a.transport},
        )
    return None


@check("partial_not_words")
def _words(a: Ask) -> tuple[str, Numbers] | None:
    width, size = partial_width(a.arch), 4 if a.dtype == "float32" else 2
    if a.N > 1 and a.split_decode and width * size % WORD:
        return (
            f"partial outputs of {width} elements of {size} bytes cannot be packed in words of "
            f"{WORD} bytes; use --dtype float32 or --dcp 1.",
            {"width": width, "bytes": size},
        )
    return None


@check("queries_form")
def _queries(a: Ask) -> tuple[str, Numbers] | None:
    if a.config.dcp_q != "auto" and (a.N == 1 or not a.split_decode):
        return (
            f"--dcp-q {a.config.dcp_q} is about striped KV and decode heads that have one owner.",
            {"dcp": a.N, "dcp_q": a.config.dcp_q},
        )
    return None


@check("context_parallel_choices")
def _cp_choices(a: Ask) -> tuple[str, Numbers] | None:
    for name in ("kv_to_q", "cp_split"):
        value = getattr(a.config, name)
        if value != "auto" and a.config.attn_cp == 1:
            flag = flag_name(name)
            return f"{flag} {value} is about context parallelism: --attn-cp is 1.", {"attn_cp": 1}
    if a.config.kv_to_q == "expand" and not isinstance(a.arch.attn, MLA):
        return (
            "--kv-to-q expand is about latents that keys and values are computed from: this model "
            f"caches those of its {a.arch.kv_heads} KV heads themselves.",
            {"kv_heads": a.arch.kv_heads},
        )
    return None


# the model's heads, experts and widths -----------------------------------------------------------


@check("heads_not_divisible")
def _heads(a: Ask) -> tuple[str, Numbers] | None:
    cut = a.A * (a.config.attn_cp if a.split_decode else 1)
    if a.arch.heads % cut:
        return (
            f"{a.arch.heads} query heads cannot be cut over {cut} ranks "
            f"({a.A} attention TP x {cut // a.A} context parallel in decode).",
            {"heads": a.arch.heads, "ranks": cut},
        )
    return None


@check("output_group_cut")
def _output_groups(a: Ask) -> tuple[str, Numbers] | None:
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
def _kv_heads(a: Ask) -> tuple[str, Numbers] | None:
    th, kv = a.A // a.S, a.arch.kv_heads
    if isinstance(a.arch.attn, GQA) and kv % th and th % kv:
        return (
            f"{kv} KV heads can neither be cut over nor replicated on {th} ranks; one number must "
            "divide the other.",
            {"kv_heads": kv, "ranks": th},
        )
    return None


@check("ep_not_divisor")
def _ep(a: Ask) -> tuple[str, Numbers] | None:
    c = a.config
    if c.tp % c.ep:
        return f"--ep {c.ep} must divide the {c.tp} ranks.", {"ep": c.ep, "tp": c.tp}
    return None


@check("no_experts")
def _no_experts(a: Ask) -> tuple[str, Numbers] | None:
    c, moe = a.config, a.arch.moe
    if moe is None and (c.ep > 1 or c.moe_dispatch != "auto"):
        flag = f"--ep {c.ep}" if c.ep > 1 else f"--moe-dispatch {c.moe_dispatch}"
        return f"{flag}: the model has no experts.", {"ep": c.ep, "experts": 0}
    if c.shared_experts != "auto" and (moe is None or not moe.shared_width):
        return f"--shared-experts {c.shared_experts}: the model has none.", {"shared_width": 0}
    return None


@check("ep_exceeds_experts")
def _ep_experts(a: Ask) -> tuple[str, Numbers] | None:
    c, moe = a.config, a.arch.moe
    if moe is not None and moe.experts < c.ep:
        return (
            f"--ep {c.ep} exceeds the model's {moe.experts} experts.",
            {"ep": c.ep, "experts": moe.experts},
        )
    return None


@check("width_below_ranks")
def _width(a: Ask) -> tuple[str, Numbers] | None:
    c, moe = a.config, a.arch.moe
    widths = {"the dense width": (a.arch.ffn_width, c.tp)}
    if moe is not None:
        dense = any(not moe.is_moe(layer) for layer in range(a.arch.layers))
        widths = {"the dense width": (a.arch.ffn_width, c.tp)} if dense else {}
        widths["the experts' width"] = (moe.width, c.tp // c.ep)
        if moe.shared_width and c.shared_experts != "replicated":
            widths["the shared experts' width"] = (moe.shared_width, c.tp)
    for name, (width, ranks) in widths.items():
        if width < ranks:
            return f"{name}, {width}, cannot be cut over {ranks} ranks.", {
                "width": width, "ranks": ranks,
            }  # fmt: skip
    return None


@check("vocabulary_below_ranks")
def _vocabulary(a: Ask) -> tuple[str, Numbers] | None:
    ranks = a.config.tp if a.config.lm_head == "all" else a.config.attn_cp * a.A
    if a.arch.vocab < ranks:
        return (
            f"a vocabulary of {a.arch.vocab} cannot be cut over {ranks} ranks.",
            {"vocab": a.arch.vocab, "ranks": ranks},
        )
    return None


# dtypes, kernels and lengths ---------------------------------------------------------------------


@check("kernel_lacks")
def _kernels(a: Ask) -> tuple[str, Numbers] | None:
    why = lacking(a.arch, a.config.ops, a.machine.device, a.dtype, a.kv_dtype)
    if why is not None:
        numbers = {"dtype": a.dtype, "kv_dtype": a.kv_dtype, "ops": a.config.ops}
        return f"--ops {a.config.ops} cannot run this model's attention: {why}.", numbers
    return None


@check("context_too_long")
def _context(a: Ask) -> tuple[str, Numbers] | None:
    asked, most = a.config.max_model_len, a.arch.max_len
    if asked is not None and asked > most:
        return (
            f"--max-model-len {asked} exceeds the model's {most} positions.",
            {"max_model_len": asked, "model": most},
        )
    return None


# looking for what fails --------------------------------------------------


def legal_stripes(cp: int, attn_tp: int) -> list[int]:
    """Stripe counts that a replica can have: 1, and cp * S with S dividing its attention TP."""
    return sorted({1} | {cp * s for s in range(1, attn_tp + 1) if attn_tp % s == 0})


def kv_per_rank(arch: Arch, ranks: int) -> int:
    """KV heads each of `ranks` ranks stores (one at least)."""
    return max(1, -(-arch.kv_heads // ranks))


def _listed(values: list[int] | list[str]) -> str:
    items = [str(v) for v in values]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " or " + items[-1]


def refuse(config: EngineConfig, arch: Arch, machine: Machine | None = None) -> Refusal | None:
    """The first check that fails, without looking for a nearest layout."""
    ask = Ask(config, arch, machine or Machine())
    for code, function in CHECKS.items():
        found = function(ask)
        if found is not None:
            return Refusal(code, *found)
    return None
