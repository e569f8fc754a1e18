"""What the user chose: one frozen dataclass whose fields are the flags of every command.

Owns names, defaults and one-line help. `cli` makes flags from the fields, `LLM` takes them as
keywords, `core.resolve` turns them into a `RunConfig` or a `Refusal`. Decides nothing itself, but
takes no value that is of another type or no choice of its field.
"""

from dataclasses import dataclass, field, fields
from typing import TypeVar, get_type_hints

Choice = str
T = TypeVar("T")


def _flag(default: T, text: str, *choices: str) -> T:
    made: T = field(default=default, metadata={"help": text, "choices": choices})
    return made


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that decides how a model is loaded and run. Sizes in tokens unless said
    otherwise.

    ValueError names the flag of a wrong value, and what it may be.
    """

    model: str | None = _flag(None, "folder, hub id, .gguf file or catalogue name")
    # machine
    device: Choice = _flag("auto", "where it runs", "auto", "cpu", "cuda")
    dtype: Choice = _flag("auto", "of weights and KV", "auto", "bfloat16", "float16", "float32")
    threads: int | None = _flag(
        None, "compute threads of each rank (default: the cores of its mask)"
    )
    cores: str | None = _flag(
        None, "cores to use, such as 0-7,16-23 (default: those this process may use)"
    )
    ranks: Choice = _flag(
        "processes", "ranks as processes, or as threads of one process", "processes", "threads"
    )
    transport: Choice = _flag("auto", "collectives between processes", "auto", "shm", "gloo")
    # layout
    tp: int = _flag(1, "ranks of one model copy (P)")
    attn_dp: int = _flag(1, "attention replicas (R)")
    attn_cp: int = _flag(1, "context-parallel ranks of a replica (C)")
    dcp: int | None = _flag(None, "KV stripes in all (N = C*S; default C; 1 keeps KV whole)")
    ep: int = _flag(1, "expert-parallel ranks; experts are cut by width over the rest")
    kv: Choice | None = _flag(
        None, "striped, or replicated (the same as --dcp 1)", "striped", "replicated"
    )
    decode_attn: Choice | None = _flag(
        None, "decode heads split over cp too, or replicated", "tp", "replicated"
    )
    dcp_exchange: Choice = _flag(
        "auto", "how partial outputs meet", "auto", "fused", "a2a", "ag_rs", "flashinfer", "lse"
    )
    dcp_q: Choice = _flag(
        "auto", "queries of a stripe group: gathered or computed", "auto", "gather", "replicate"
    )
    dcp_interleave: int = _flag(1, "consecutive positions of one stripe (I)")
    cp_split: Choice = _flag("auto", "prefill rows over cp", "auto", "zigzag", "interleaved")
    kv_to_q: Choice = _flag("auto", "prefill KV over cp", "auto", "gather", "expand", "ring")
    row_moves: Choice = _flag(
        "auto", "rows of replicas into the experts", "auto", "max", "sum", "v"
    )
    moe_dispatch: Choice = _flag("auto", "rows to experts", "auto", "gather", "a2a")
    lm_head: Choice = _flag(
        "auto", "head sharded over a replica's ranks or all", "auto", "replica", "all"
    )
    shared_experts: Choice = _flag(
        "auto",
        "shared experts cut by width or whole on every rank",
        "auto",
        "sharded",
        "replicated",
    )
    embedding: Choice = _flag(
        "auto", "embedding whole or cut by vocabulary in a replica", "auto", "whole", "sharded"
    )
    residual: Choice = _flag(
        "auto", "residual rows between blocks", "auto", "sharded", "replica", "replicated"
    )
    force: bool = _flag(False, "accept stripe factors that save no memory")
    # capacity
    max_model_len: int | None = _flag(
        None, "context length (default: the model's, as memory allows)"
    )
    max_running: int = _flag(128, "requests that run at once, per replica")
    max_waiting: int = _flag(1024, "requests that wait before 429")
    page_size: int = _flag(64, "tokens of a logical KV page")
    prefill_chunk: int = _flag(1024, "prefill rows of a step, per cp rank")
    workspace_tokens: int = _flag(65536, "most cached positions gathered at a time in prefill")
    kv_memory: str | None = _flag(
        None, "KV memory per rank, such as 2GiB (default: from what is free)"
    )
    kv_pages: int | None = _flag(None, "KV pages per replica (overrides kv_memory)")
    kv_dtype: Choice = _flag("auto", "of cached rows", "auto", "bfloat16", "float16", "float32")
    quant: Choice = _flag(
        "auto", "weights: as in the checkpoint, or quantised at load", "auto", "none"
    )
    prefix_cache: bool = _flag(True, "reuse KV of shared prefixes")
    load_format: Choice = _flag("auto", "auto, or dummy random weights", "auto", "dummy")
    seed: int = _flag(0, "of dummy weights and of requests that name none")
    # debugging
    debug: str = _flag("", "comma list of poison, trace, checksum, pad")
    debug_dir: str | None = _flag(None, "where traces are written")
    ops: Choice = _flag("auto", "provider of ops", "auto", "reference", "cpp")

    def __post_init__(self) -> None:
        for f in fields(self):
            value, hint = getattr(self, f.name), HINTS[f.name]
            name, choices = flag_name(f.name), f.metadata["choices"]
            if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
                wanted = getattr(hint, "__name__", str(hint))
                raise ValueError(f"{name} {value!r}: wanted {wanted}")
            if choices and value is not None and value not in choices:
                raise ValueError(f"{name} {value}: choose one of {', '.join(choices)}")

    @property
    def debug_switches(self) -> frozenset[str]:
        return frozenset(s for s in self.debug.split(",") if s)


HINTS = get_type_hints(EngineConfig)
ENGINE_FIELDS = tuple(f.name for f in fields(EngineConfig))
