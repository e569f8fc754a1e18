"""What each provider's attention kernels can do, as data that `core.checks` reads without torch.

A test holds the kernels to it: what is listed runs and equals the reference, the rest is an error.
Owns no choice of provider; that is made per device by `ops.bind`.
"""

from dataclasses import dataclass

from anabranch.core.arch import GQA, MLA, Arch

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Ability:
    """One attention op of one provider. Queries and pool are of one dtype, one of `dtypes`.

    unit: head widths are multiples of it. most_width: widest query or key. windows, sinks: what it
    takes. Every attention kernel returns the lse, and none may apply a sink that will be merged.
    """

    op: str
    provider: str
    device: str
    dtypes: tuple[str, ...] = FLOATS
    unit: int = 1
    most_width: int = 1 << 16
    windows: bool = True
    sinks: bool = True


OPS = ("attend_rows", "attend_paged_gqa", "attend_paged_mla")

ABILITIES = (
    *(Ability(op, "reference", device) for op in OPS for device in ("cpu", "cuda")),
    *(Ability(op, "cpp", "cpu") for op in OPS),
)

WORD = 4
"""Bytes: a head's partial output is packed in words, with an aligned fp32 lse behind it."""


def attention_op(arch: Arch) -> str:
    """The op that reads a model's cached entries in place."""
    return "attend_paged_gqa" if isinstance(arch.attn, GQA) else "attend_paged_mla"


def lacking(arch: Arch, provider: str, device: str, dtype: str, kv_dtype: str) -> str | None:
    """Why no kernel of the provider ("auto": of any) runs the model's attention, or None."""
    named = [a for a in ABILITIES if a.device == device and provider in ("auto", a.provider)]
    for op in ("attend_rows", attention_op(arch)):
        able = [a for a in named if a.op == op]
        if not able:
            return f"{op} has no provider {provider!r} on {device}"
        reasons = [_short(a, arch, dtype, kv_dtype) for a in able]
        if all(reasons):
            return f"{op} of {able[0].provider}: {reasons[0]}"
    return None


def _short(a: Ability, arch: Arch, dtype: str, kv_dtype: str) -> str | None:
    width = query_width(arch)
    if dtype not in a.dtypes:
        return f"dtype {dtype} is none of {', '.join(a.dtypes)}"
    if kv_dtype != dtype:
        return f"it reads cached rows of the queries' dtype: --kv-dtype {kv_dtype}, not {dtype}"
    if width > a.most_width or width % a.unit:
        return f"heads of {width} elements; it takes multiples of {a.unit} up to {a.most_width}"
    if arch.windows and not a.windows:
        return "it has no sliding windows"
    return None


def query_width(arch: Arch) -> int:
    """Elements of a query that meets cached entries."""
    attn = arch.attn
    return attn.kv_lora + attn.rope if isinstance(attn, MLA) else attn.head_dim


def partial_width(arch: Arch) -> int:
    """Elements of one head's partial output over a stripe."""
    attn = arch.attn
    return attn.kv_lora if isinstance(attn, MLA) else attn.head_dim
