"""Weight recipes of the blocks that families share: integers and checkpoint names, no tensors.

A checkpoint name is a prefix plus the name of the released form. Absent parameters are absent here.
"""

from collections.abc import Callable

from anabranch.core.arch import GQA, MLA, Arch
from anabranch.layout.choice import Place
from anabranch.weights.recipe import Heads, Param, Source


def rows(name: str, shape: tuple[int, ...], start: int, stop: int) -> Source:
    return Source(name, shape, ((start, stop),))


def whole(local: str, name: str, *shape: int, dtype: str | None = None) -> Param:
    return Param(local, shape, (Source(name, shape),), dtype)


SWIGLU = ("gate_proj", "up_proj", "down_proj")


def vocabulary(
    arch: Arch,
    place: Place,
    embed: str = "model.embed_tokens.weight",
    head: str = "lm_head.weight",
    norm: str = "model.norm.weight",
) -> list[Param]:
    shape = (arch.vocab, arch.hidden)
    start, stop = place.embedding(arch.vocab)
    params = [Param("embed", (stop - start, arch.hidden), (rows(embed, shape, start, stop),))]
    start, stop = place.head(arch.vocab)
    name = embed if arch.tied else head
    params.append(Param("head", (stop - start, arch.hidden), (rows(name, shape, start, stop),)))
    params.append(whole("norm", norm, arch.hidden))
    return params


def gqa(arch: Arch, place: Place, local: str, name: str) -> list[Param]:
    """q and o by resident heads, k and v by stored KV heads."""
    attn = arch.attn
    assert isinstance(attn, GQA)
    width, params = attn.head_dim, []
    for part, heads, total in (
        ("q", place.query_heads, attn.heads),
        ("k", place.kv, attn.kv_heads),
        ("v", place.kv, attn.kv_heads),
    ):
        start, stop = heads.start * width, heads.stop * width
        source = rows(f"{name}.{part}_proj.weight", (total * width, arch.hidden), start, stop)
        by: Heads = "queries" if part == "q" else ""
        params.append(Param(f"{local}.{part}", source.local_shape, (source,), unit=width, heads=by))
        if attn.qkv_bias:
            bias = rows(f"{name}.{part}_proj.bias", (total * width,), start, stop)
            params.append(
                Param(f"{local}.{part}_bias", bias.local_shape, (bias,), unit=width, heads=by)
            )
        if attn.qk_norm and part != "v":
            params.append(whole(f"{local}.{part}_norm", f"{name}.{part}_norm.weight", width))
    params += output(arch, place, local, name, attn.heads, width)
    if attn.o_bias:
        params.append(whole(f"{local}.o_bias", f"{name}.o_proj.bias", arch.hidden))
    if attn.sinks:
        sink = rows(f"{name}.sinks", (attn.heads,), place.heads.start, place.heads.stop)
        params.append(
            Param(f"{local}.sinks", sink.local_shape, (sink,), "float32", heads="outputs")
        )
    return params


def output(arch: Arch, place: Place, local: str, name: str, heads: int, width: int) -> list[Param]:
    """o_proj: its inputs are cut by resident heads, and lie in blocks of the heads that one rank
    owns in decode, so that a decode slice is one run of memory."""
    unit, name = len(place.owned) * width, f"{name}.o_proj.weight"
    sources = tuple(
        Source(name, (arch.hidden, heads * width), ((0, arch.hidden), (start, start + unit)))
        for start in range(place.heads.start * width, place.heads.stop * width, unit)
    )
    shape = (len(sources), arch.hidden, unit)
    return [Param(f"{local}.o", shape, sources, heads="outputs")]


def mla(arch: Arch, place: Place, local: str, name: str) -> list[Param]:
    """q_b (or q), kv_b and o by heads; what makes the cached row is whole on every rank."""
    attn = arch.attn
    assert isinstance(attn, MLA)
    head = attn.nope + attn.rope
    params = []
    if attn.q_lora is not None:
        params.append(whole(f"{local}.q_a", f"{name}.q_a_proj.weight", attn.q_lora, arch.hidden))
        params.append(whole(f"{local}.q_a_norm", f"{name}.q_a_layernorm.weight", attn.q_lora))
        if attn.bias:
            params.append(whole(f"{local}.q_a_bias", f"{name}.q_a_proj.bias", attn.q_lora))
    queries = place.query_heads
    q_name = f"{name}.q_proj.weight" if attn.q_lora is None else f"{name}.q_b_proj.weight"
    q_shape = (attn.heads * head, attn.q_lora or arch.hidden)
    q = rows(q_name, q_shape, queries.start * head, queries.stop * head)
    params.append(Param(f"{local}.q", q.local_shape, (q,), unit=head, heads="queries"))
    latent = attn.kv_lora + attn.rope
    kv_a = f"{name}.kv_a_proj_with_mqa"
    params.append(whole(f"{local}.kv_a", f"{kv_a}.weight", latent, arch.hidden))
    if attn.bias:
        params.append(whole(f"{local}.kv_a_bias", f"{kv_a}.bias", latent))
    params.append(whole(f"{local}.kv_a_norm", f"{name}.kv_a_layernorm.weight", attn.kv_lora))
    both = attn.nope + attn.v
    kv_b = rows(
        f"{name}.kv_b_proj.weight",
        (attn.heads * both, attn.kv_lora),
        queries.start * both,
        queries.stop * both,
    )
    shape = (len(queries), both, attn.kv_lora)
    params.append(Param(f"{local}.kv_b", shape, (kv_b,), unit=both, heads="queries"))
    params += output(arch, place, local, name, attn.heads, attn.v)
    if attn.bias:
        params.append(whole(f"{local}.o_bias", f"{name}.o_proj.bias", arch.hidden))
    return params


def gated(
    local: str,
    name: str,
    hidden: int,
    width: int,
    cut: tuple[int, int],
    bias: bool = False,
    parts: tuple[str, str, str] = SWIGLU,
) -> list[Param]:
    """A SwiGLU block, `cut` of its width: gate rows and up rows in one parameter. parts: the names
    of its gate, up and down projections."""
    start, stop = cut
    kept = stop - start
    *ups, last = parts
    pair = tuple(rows(f"{name}.{p}.weight", (width, hidden), start, stop) for p in ups)
    down = Source(f"{name}.{last}.weight", (hidden, width), ((0, hidden), cut))
    params = [
        Param(f"{local}.gate_up", (2 * kept, hidden), pair),
        Param(f"{local}.down", (hidden, kept), (down,)),
    ]
    if bias:
        both = tuple(rows(f"{name}.{p}.bias", (width,), start, stop) for p in ups)
        params.append(Param(f"{local}.gate_up_bias", (2 * kept,), both))
        params.append(whole(f"{local}.down_bias", f"{name}.{last}.bias", hidden))
    return params


def router(arch: Arch, local: str, name: str, correction: str | None = None) -> list[Param]:
    """The router, whole, in fp32. correction: name of the bias that is for selection only."""
    spec = arch.moe
    assert spec is not None
    local = f"{local}.router"
    params = [whole(local, f"{name}.weight", spec.experts, arch.hidden, dtype="float32")]
    if spec.bias:
        params.append(whole(f"{local}_bias", f"{name}.bias", spec.experts, dtype="float32"))
    if correction is not None:
        bias = f"{name}.{correction}"
        params.append(whole(f"{local}_correction", bias, spec.experts, dtype="float32"))
    return params


def experts(
    arch: Arch, place: Place, local: str, name: str, parts: tuple[str, str, str] = SWIGLU
) -> list[Param]:
    """Routed experts cut by index and by width; shared experts cut or whole."""
    spec = arch.moe
    assert spec is not None
    first, last = place.experts(spec.experts)
    start, stop = place.expert_width(spec.width)
    kept, hidden = stop - start, arch.hidden
    gate, up, down = parts
    ups: list[Source] = []
    downs: list[Source] = []
    for e in range(first, last):
        expert = f"{name}.experts.{e}"
        for p in (gate, up):
            ups.append(rows(f"{expert}.{p}.weight", (spec.width, hidden), start, stop))
        cut = ((0, hidden), (start, stop))
        downs.append(Source(f"{expert}.{down}.weight", (hidden, spec.width), cut))
    count = last - first
    params = [
        Param(f"{local}.gate_up", (count, 2 * kept, hidden), tuple(ups)),
        Param(f"{local}.down", (count, hidden, kept), tuple(downs)),
    ]
    if spec.shared_width:
        sharded = place.layout.shared_experts == "sharded"
        width = place.width(spec.shared_width) if sharded else (0, spec.shared_width)
        shared = f"{name}.shared_experts"
        params += gated(f"{local}.shared", shared, hidden, spec.shared_width, width, parts=parts)
    return params


def moe(arch: Arch, place: Place, local: str, name: str) -> list[Param]:
    spec = arch.moe
    assert spec is not None
    correction = "e_score_correction_bias" if spec.correction_bias else None
    return router(arch, local, f"{name}.gate", correction) + experts(arch, place, local, name)


FfnRecipe = Callable[[Arch, Place, str, str], list[Param]]


def decoder(arch: Arch, place: Place, moe: FfnRecipe = moe) -> tuple[Param, ...]:
    """Every parameter of a rank, for the families that share the Llama names. moe: of a layer with
    experts."""
    params = vocabulary(arch, place)
    attention = gqa if isinstance(arch.attn, GQA) else mla
    for i in range(arch.layers):
        local, name = f"layers.{i}", f"model.layers.{i}"
        params.append(whole(f"{local}.attn_norm", f"{name}.input_layernorm.weight", arch.hidden))
        params.append(
            whole(f"{local}.ffn_norm", f"{name}.post_attention_layernorm.weight", arch.hidden)
        )
        params += attention(arch, place, f"{local}.attn", f"{name}.self_attn")
        if arch.moe is not None and arch.moe.is_moe(i):
            params += moe(arch, place, f"{local}.moe", f"{name}.mlp")
        else:
            cut = place.width(arch.ffn_width)
            params += gated(
                f"{local}.mlp", f"{name}.mlp", arch.hidden, arch.ffn_width, cut, arch.mlp_bias
            )
    return tuple(params)
