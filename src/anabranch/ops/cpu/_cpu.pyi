from collections.abc import Sequence

from torch import Tensor

from anabranch.ops.signatures import Direction

def team_name() -> str: ...
def isas() -> list[tuple[str, bool]]: ...
def has_tiles() -> bool: ...

class Provider:
    def __init__(self, isa: str, threads: int, tensor_type: type[Tensor], /) -> None: ...
    def copy_rows(
        self,
        dst: Tensor,
        src: Tensor,
        offset: int | Tensor,
        count: int | Tensor,
        direction: Direction,
    ) -> None: ...
    def sum_members(self, parts: Tensor | Sequence[Tensor], out: Tensor) -> None: ...
    def pack_partials(self, out: Tensor, lse: Tensor, dst_out: Tensor, dst_lse: Tensor) -> None: ...
    def merge_partials(
        self,
        partials: Tensor,
        lse: Tensor,
        base2: bool,
        sink: Tensor | None,
        out: Tensor,
        lse_out: Tensor,
    ) -> None: ...
    def attend_paged_gqa(
        self,
        q: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        page_slots: int,
        kv_map: Tensor,
        scale: float,
        start: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None: ...
    def attend_paged_mla(
        self,
        q: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        page_slots: int,
        value_width: int,
        scale: float,
        start: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None: ...
    def attend_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        kv_map: Tensor,
        scale: float,
        window: int,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def gated(
        self, both: Tensor, limit: float, alpha: float, shift: float, out: Tensor
    ) -> None: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None: ...
    def run_experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first: int,
        gate_up: Tensor,
        down: Tensor,
        limit: float,
        alpha: float,
        shift: float,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        out: Tensor,
    ) -> None: ...
