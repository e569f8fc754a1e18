"""How much memory a model and its KV take: pages of a replica from what the machine leaves.

Estimates to plan with, in integers; what is really allocated is the worker's business.
"""

from anabranch.core.arch import Arch
from anabranch.core.ask import Machine, Refusal
from anabranch.core.config import EngineConfig

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

FREE_SHARE = 0.6
"""Of the memory that weights leave, the part that KV may take."""


def parse_bytes(text: str) -> int:
    """ "2GiB", "512M" or "1000" -> bytes. ValueError otherwise, or below 0."""
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        size = int(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(f"{text!r} is not a size; write 2GiB, 512MiB or bytes")
    return size


def kv_budget(config: EngineConfig, machine: Machine, weights: int) -> int:
    """Bytes of KV on each rank: --kv-memory, or a share of what weights (bytes) leave."""
    ranks = config.tp if machine.device == "cpu" else 1
    if config.kv_memory is None:
        return max(0, int((machine.memory - weights) * FREE_SHARE)) // ranks
    if config.kv_memory.endswith("%"):
        # other engines' share of memory: for weights and KV together
        share = parse_bytes(config.kv_memory[:-1]) / 100
        return max(0, int(machine.memory * share) - weights) // ranks
    return parse_bytes(config.kv_memory)


def kv_pages(config: EngineConfig, budget: int, page_bytes: int, page: int, length: int) -> int:
    """Pages of a replica within `budget` bytes a rank: at most what max_running requests of
    `length` tokens need. Refusal if not even two fit."""
    needed = config.max_running * -(-length // page)
    pages = min(budget // max(1, page_bytes), needed)
    if pages < 2:
        raise Refusal(
            "no_memory_for_kv",
            f"{budget} bytes for the KV of a rank hold {pages} pages of {page_bytes} bytes; "
            "at least 2 are needed: use a smaller model, more stripes or --kv-memory.",
            {"budget": budget, "bytes_per_page": page_bytes},
        )
    return pages


def weight_elements(arch: Arch) -> int:
    """Parameters of the whole model, near enough to size memory."""
    outer = arch.vocab * arch.hidden * (1 if arch.tied else 2)
    return outer + _layer_elements(arch, arch.moe.experts if arch.moe else 0)


def attention_reach(arch: Arch) -> int | None:
    """Cached positions with which a row's attention costs as much as its products with weights.

    Counted in multiplications, over the layers that see every position; None if there are none.
    """
    whole = arch.layers - sum(w is not None for w in arch.attn.windows)
    if not whole:
        return None
    row = _layer_elements(arch, arch.moe.top_k if arch.moe else 0)
    return max(1, row // (whole * arch.attn.pair_products))


def _layer_elements(arch: Arch, experts: int) -> int:
    """Parameters of all layers, with as many routed experts in each of those that have some."""
    d, moe, total = arch.hidden, arch.moe, arch.layers * arch.attn.elements(arch.hidden)
    for layer in range(arch.layers):
        if moe is not None and moe.is_moe(layer):
            total += 3 * d * (experts * moe.width + moe.shared_width) + moe.experts * d
        else:
            total += 3 * d * arch.ffn_width
    return total
