"""DeepSeek-V4 without compressors (`compress_ratios` all 0): its recipe. No tensors.

Sliding-window attention over one shared head with sinks and a grouped output, hyper-connections,
experts chosen by token id in the first layers. Names are those of the release
(huggingface.co/deepseek-ai/DeepSeek-V4-Flash); norms, sinks and mixing weights stay in fp32.
"""

from dataclasses import replace

from anabranch.core.arch import Arch, SharedKV
from anabranch.layout.choice import Place
from anabranch.layout.ownership import within
from anabranch.models.recipes import experts, router, rows, vocabulary, whole
from anabranch.weights.recipe import Param, Recipe, Source

PARTS = ("w1", "w3", "w2")


def recipe(arch: Arch, place: Place) -> Recipe:
    assert arch.moe is not None
    params = vocabulary(arch, place, "embed.weight", "head.weight", "norm.weight")
    params[-1] = replace(params[-1], dtype="float32")
    params += _mixing(arch, "ends", "hc_head", _streams(arch), 1)
    for i in range(arch.layers):
        name = f"layers.{i}"
        for norm in ("attn_norm", "ffn_norm"):
            params.append(_norm(f"{name}.{norm}", f"{name}.{norm}", arch.hidden))
        params += _attention(arch, place, f"{name}.attn")
        n = _streams(arch)
        for block in ("attn", "ffn"):
            params += _mixing(arch, f"{name}.{block}_join", f"{name}.hc_{block}", (2 + n) * n, 3)
        params += _router(arch, i)
        params += experts(arch, place, f"{name}.moe", f"{name}.ffn", PARTS)
    return tuple(params)


def _streams(arch: Arch) -> int:
    assert arch.hyper is not None
    return arch.hyper.streams


def _norm(local: str, name: str, width: int) -> Param:
    return whole(local, f"{name}.weight", width, dtype="float32")


def _mixing(arch: Arch, local: str, name: str, outputs: int, scales: int) -> list[Param]:
    shapes = {"fn": (outputs, _streams(arch) * arch.hidden), "base": (outputs,), "scale": (scales,)}
    return [
        whole(f"{local}.{part}", f"{name}_{part}", *shape, dtype="float32")
        for part, shape in shapes.items()
    ]


def _router(arch: Arch, layer: int) -> list[Param]:
    """Scores as everywhere; which experts, in the first layers, from a table of token ids."""
    spec, local, name = arch.moe, f"layers.{layer}.moe", f"layers.{layer}.ffn.gate"
    assert spec is not None
    if layer >= spec.hash_layers:
        return router(arch, local, name, "bias")
    shape = (arch.vocab, spec.top_k)
    table = whole(f"{local}.router_table", f"{name}.tid2eid", *shape, dtype="int64")
    return [*router(arch, local, name), table]


def _attention(arch: Arch, place: Place, name: str) -> list[Param]:
    """wq_b, wo_a, wo_b and sinks by heads; what makes the cached row is whole on every rank."""
    attn, d = arch.attn, arch.hidden
    assert isinstance(attn, SharedKV)
    width, heads, queries = attn.head_dim, place.heads, place.query_heads
    q_b = rows(
        f"{name}.wq_b.weight",
        (attn.heads * width, attn.q_lora),
        queries.start * width,
        queries.stop * width,
    )
    first, last = heads.start // attn.group, -(-heads.stop // attn.group)
    inner = (first * attn.o_lora, last * attn.o_lora)
    # heads within their group, which are all of it unless the group is cut
    cut = (
        (0, attn.group)
        if last - first > 1
        else within(heads, range(first * attn.group, last * attn.group))
    )
    columns = (cut[0] * width, cut[1] * width)
    o_a = Source(
        f"{name}.wo_a.weight", (attn.o_groups * attn.o_lora, attn.group * width), (inner, columns)
    )
    o_b = Source(f"{name}.wo_b.weight", (d, attn.o_groups * attn.o_lora), ((0, d), inner))
    sink = rows(f"{name}.attn_sink", (attn.heads,), heads.start, heads.stop)
    grouped = (last - first, attn.o_lora, columns[1] - columns[0])
    return [
        whole(f"{name}.q_a", f"{name}.wq_a.weight", attn.q_lora, d),
        _norm(f"{name}.q_a_norm", f"{name}.q_norm", attn.q_lora),
        Param(f"{name}.q", q_b.local_shape, (q_b,), unit=width, heads="queries"),
        whole(f"{name}.kv", f"{name}.wkv.weight", width, d),
        _norm(f"{name}.kv_norm", f"{name}.kv_norm", width),
        Param(f"{name}.o_a", grouped, (o_a,), heads="outputs"),
        Param(f"{name}.o_b", o_b.local_shape, (o_b,), heads="outputs"),
        Param(f"{name}.sinks", sink.local_shape, (sink,), "float32", heads="outputs"),
    ]
