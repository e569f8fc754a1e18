"""What a `RunConfig` means for the scheduler, and how it is shown to users. No torch."""

import json

from anabranch import __version__
from anabranch.core.capacity import attention_reach
from anabranch.core.resolve import RunConfig
from anabranch.sched import SchedulerConfig


def scheduler_config(run: RunConfig) -> SchedulerConfig:
    config = run.config
    return SchedulerConfig(
        pages=run.kv_pages,
        replicas=config.attn_dp,
        page_size=run.page_size,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        prefill_rows=config.prefill_chunk * config.attn_cp,
        max_model_len=run.max_model_len,
        vocab_size=run.arch.vocab,
        eos_ids=run.arch.eos_ids,
        prefix_cache=config.prefix_cache,
        reach=attention_reach(run.arch),
        depth=2 if run.device == "cuda" else 1,
        seed=config.seed,
    )


def describe_run(run: RunConfig) -> str:
    """What /server_info says, as JSON."""
    layout, config = run.layout, run.config
    stripes = layout.stripes.count
    return json.dumps(
        {
            "version": __version__,
            "model": {
                "name": config.model,
                "family": run.arch.family,
                "dtype": run.dtype,
                "max_model_len": run.max_model_len,
            },
            "layout": {
                "tp": config.tp,
                "attn_dp": config.attn_dp,
                "attn_cp": config.attn_cp,
                "dcp": stripes,
                "ep": config.ep,
                "decode_attn": "tp" if layout.split_decode else "replicated",
                "residual": layout.residual,
                "row_moves": layout.row_moves,
                "moe_dispatch": layout.moe_dispatch,
                "lm_head": layout.lm_head,
            },
            "kv": {
                "tokens": run.kv_pages * run.page_size * config.attn_dp,
                "copies": layout.mesh.replica_size // stripes,
                "bytes_per_token_per_rank": run.kv_bytes_per_token,
            },
            "ops": config.ops,
            "routes": {"transport": config.transport, "dcp_exchange": layout.dcp_exchange},
            "notes": list(run.notes),
        }
    )
