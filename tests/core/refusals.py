"""One or more settings for every refusal: what the tests reach and docs/layouts.md shows."""

from collections.abc import Mapping
from dataclasses import replace

from tests.layouts import gqa_arch, mla_arch

from anabranch.core.arch import Arch, MoE, SharedKV
from anabranch.core.ask import Machine

MLA24, GQA4 = mla_arch(), gqa_arch(kv_heads=4)
DENSE = replace(GQA4, moe=None)
SHARED = replace(
    MLA24, attn=SharedKV(24, 16, 8, 40, o_groups=8, o_lora=16, scale=0.25, windows=(None, 64))
)
ODD = gqa_arch(kv_heads=4)
ODD = replace(ODD, attn=replace(ODD.attn, head_dim=7))
BIG = Machine(memory=1 << 33, cores=8)

CASES: list[tuple[str, Mapping[str, object], Arch]] = [
    ("size_not_positive", {"tp": 0}, MLA24),
    ("size_not_positive", {"attn_cp": 0}, MLA24),
    ("size_not_positive", {"dcp": 0}, MLA24),
    ("size_not_positive", {"page_size": -1}, MLA24),
    ("ranks_too_many", {"tp": 2**31}, MLA24),
    ("running_too_many", {"max_running": 10**9}, MLA24),
    ("seed_range", {"seed": 2**63}, MLA24),
    ("threads_too_many", {"threads": 100_000}, MLA24),
    ("kv_memory_no_size", {"kv_memory": "nan"}, MLA24),
    ("kv_memory_no_size", {"kv_memory": "-1GiB"}, MLA24),
    ("share_above_all", {"kv_memory": "200%"}, MLA24),
    ("kv_above_memory", {"kv_pages": 100_000_000}, MLA24),
    ("world_not_product", {"tp": 4, "attn_dp": 3}, MLA24),
    ("world_not_product", {"tp": 2, "attn_dp": 2, "attn_cp": 2}, MLA24),
    ("device_ranks", {"tp": 4}, MLA24),
    ("transport_of_threads", {"tp": 2, "ranks": "threads", "transport": "gloo"}, MLA24),
    ("unknown_debug_switch", {"debug": "poison,loud"}, MLA24),
    ("kv_contradiction", {"tp": 2, "attn_cp": 2, "kv": "replicated", "dcp": 2}, MLA24),
    ("kv_contradiction", {"tp": 2, "kv": "striped"}, MLA24),
    ("stripes_cross_replicas", {"tp": 4, "attn_dp": 2, "dcp": 4}, MLA24),
    ("stripes_not_legal", {"tp": 4, "attn_cp": 2, "dcp": 3}, MLA24),
    ("stripes_not_legal", {"tp": 4, "dcp": 8}, MLA24),
    ("stripes_gain_nothing", {"tp": 2, "dcp": 2}, GQA4),
    ("interleave_without_stripes", {"tp": 2, "dcp_interleave": 2}, MLA24),
    ("decode_tp_needs_cp", {"tp": 2, "decode_attn": "tp"}, MLA24),
    ("decode_replicated_needs_cp", {"tp": 2, "decode_attn": "replicated"}, MLA24),
    (
        "decode_replicated_stripes",
        {"tp": 4, "attn_cp": 2, "dcp": 4, "decode_attn": "replicated"},
        MLA24,
    ),
    ("exchange_without_stripes", {"tp": 2, "dcp_exchange": "a2a"}, MLA24),
    ("exchange_form", {"tp": 2, "attn_cp": 2, "dcp_exchange": "lse"}, MLA24),
    (
        "exchange_form",
        {"tp": 2, "attn_cp": 2, "decode_attn": "replicated", "dcp_exchange": "a2a"},
        MLA24,
    ),
    (
        "exchange_transport",
        {"tp": 2, "attn_cp": 2, "dcp_exchange": "fused", "transport": "gloo"},
        MLA24,
    ),
    ("partial_not_words", {"tp": 2, "attn_cp": 2, "dtype": "bfloat16"}, ODD),
    ("queries_form", {"tp": 2, "dcp_q": "replicate"}, MLA24),
    (
        "queries_form",
        {"tp": 2, "attn_cp": 2, "decode_attn": "replicated", "dcp_q": "gather"},
        MLA24,
    ),
    ("context_parallel_choices", {"tp": 2, "kv_to_q": "ring"}, MLA24),
    ("context_parallel_choices", {"tp": 2, "attn_cp": 2, "kv_to_q": "expand"}, GQA4),
    ("context_parallel_choices", {"tp": 2, "cp_split": "zigzag"}, MLA24),
    ("heads_not_divisible", {"tp": 5}, MLA24),
    ("heads_not_divisible", {"tp": 16, "attn_cp": 16}, MLA24),
    ("output_group_cut", {"tp": 12}, SHARED),
    ("kv_heads_not_divisible", {"tp": 3}, GQA4),
    ("ep_not_divisor", {"tp": 4, "ep": 3}, MLA24),
    ("no_experts", {"tp": 2, "ep": 2}, DENSE),
    ("no_experts", {"tp": 2, "moe_dispatch": "a2a"}, DENSE),
    ("no_experts", {"tp": 2, "shared_experts": "sharded"}, DENSE),
    ("ep_exceeds_experts", {"tp": 12, "ep": 12}, MLA24),
    ("width_below_ranks", {"tp": 4}, replace(MLA24, moe=MoE(10, 2, width=3))),
    ("vocabulary_below_ranks", {"tp": 8}, replace(MLA24, vocab=5)),
    ("kernel_lacks", {"dtype": "bfloat16", "kv_dtype": "float32"}, MLA24),
    ("kernel_lacks", {"ops": "cpp"}, MLA24),
    ("context_too_long", {"max_model_len": 5000}, MLA24),
    ("kv_below_context", {"max_model_len": 4096, "kv_pages": 3}, MLA24),
    ("no_memory_for_kv", {"kv_memory": "1KiB"}, MLA24),
]
"""(code, flags, model). The cuda machine of two GPUs stands for device_ranks and for ops cpp."""

RESOLVED = {"kv_below_context", "kv_above_memory", "no_memory_for_kv"}
"""Codes of refusals that need sizes, raised by resolve itself."""


def machine_of(code: str, flags: Mapping[str, object]) -> Machine:
    gpu = code == "device_ranks" or (code == "kernel_lacks" and flags.get("ops") == "cpp")
    return Machine(device="cuda", gpus=2) if gpu else BIG
