"""How queries meet entries: one object per attention kind, over rows at hand or over a paged pool.

A kernel knows the form of an entry and nothing of ranks: exchanges call it with whatever entries
are in reach. Both calls return (out [T, H, Dv], lse [T, H] fp32, natural log) and never apply a
sink: their result may be merged, and the sink belongs to the merge.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.nn.step import Paged
from anabranch.ops import Ops


class Kernel(Protocol):
    """q [T, H, Dq]; entries [S, W] as a layer's pool stores them; keys [S, G, Dq] and values
    [S, G, Dv] of them.

    Kernels derive from it: one that leaves `pad_len` out cannot be made.
    """

    @property
    @abstractmethod
    def pad_len(self) -> int:
        """Entries that `paged` is told a padded row sees: 0, or 1 where it cannot do with none.

        Asked in every step, so a kernel made of several answers for the part in use.
        """
        ...

    def computed(self, entries: Tensor) -> Tensor | None:
        """What `keys_values` would multiply out of each entry [S, C], if anything."""
        return None

    @abstractmethod
    def keys_values(self, entries: Tensor, computed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of entries at hand; computed: of the same entries, perhaps by another rank, or None.

        Those of a head lie behind one another, as many rows will read them.
        """
        ...

    @abstractmethod
    def rows(
        self, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values at hand, causal by position."""
        ...

    @abstractmethod
    def paged(self, q: Tensor, pool: Tensor, where: Paged) -> tuple[Tensor, Tensor]:
        """This rank's cached entries, as many as `where` says per row."""
        ...


@dataclass(frozen=True)
class GqaKernel(Kernel):
    """Entries are [2, kv_heads, D]; kv_map int32 [H] gives each query head its KV head."""

    ops: Ops
    kv_map: Tensor
    head_dim: int
    scale: float
    window: int | None = None
    pad_len = 0

    def keys_values(self, entries: Tensor, computed: Tensor | None) -> tuple[Tensor, Tensor]:
        kv_2GSD = torch.unflatten(entries, -1, (2, -1, self.head_dim)).permute(1, 2, 0, 3)
        keys, values = kv_2GSD.contiguous()
        return keys.transpose(0, 1), values.transpose(0, 1)

    def rows(
        self, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.ops.attend_rows(
            q, keys, values, q_pos, k_pos,
            kv_map=self.kv_map, scale=self.scale, window=self.window,
        )  # fmt: skip

    def paged(self, q: Tensor, pool: Tensor, where: Paged) -> tuple[Tensor, Tensor]:
        return self.ops.attend_paged_gqa(
            q, pool, where.page_table, where.lens[self.pad_len], page_slots=where.local_page,
            kv_map=self.kv_map, scale=self.scale,
            start=None if self.window is None else where.starts[self.window],
        )  # fmt: skip


@dataclass(frozen=True)
class LatentKernel(Kernel):
    """One entry for all heads, whose first `value` elements are the value.

    MLA absorbed: q is [T, H, kv_lora + rope], the value is the latent. Shared KV: the whole entry.
    """

    ops: Ops
    zeros: Tensor
    value: int
    scale: float
    window: int | None = None
    pad_len = 0

    def keys_values(self, entries: Tensor, computed: Tensor | None) -> tuple[Tensor, Tensor]:
        keys = entries.unsqueeze(1)
        return keys, keys[..., : self.value]

    def rows(
        self, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.ops.attend_rows(
            q, keys, values, q_pos, k_pos,
            kv_map=self.zeros[: q.shape[1]], scale=self.scale, window=self.window,
        )  # fmt: skip

    def paged(self, q: Tensor, pool: Tensor, where: Paged) -> tuple[Tensor, Tensor]:
        return self.ops.attend_paged_mla(
            q, pool, where.page_table, where.lens[self.pad_len], page_slots=where.local_page,
            value_width=self.value, scale=self.scale,
            start=None if self.window is None else where.starts[self.window],
        )  # fmt: skip


@dataclass(frozen=True)
class ExpandedKernel(Kernel):
    """MLA, expanded: keys and values of each head are computed from the latent of the entries.

    kv_b [H, nope + v, kv_lora]. Only over rows at hand: a pool is read in absorbed form.
    """

    ops: Ops
    kv_b: Tensor
    heads: Tensor
    nope: int
    scale: float
    pad_len = 0

    def computed(self, entries: Tensor) -> Tensor:
        return entries[:, : self.kv_b.shape[2]] @ self.kv_b.flatten(0, 1).t()

    def keys_values(self, entries: Tensor, computed: Tensor | None) -> tuple[Tensor, Tensor]:
        heads, width, latent = self.kv_b.shape
        flat = self.computed(entries) if computed is None else computed
        kv_HSC = flat.view(-1, heads, width).transpose(0, 1)
        rope = entries[:, latent:].expand(heads, -1, -1)
        keys = torch.cat((kv_HSC[..., : self.nope], rope), dim=-1)
        values = kv_HSC[..., self.nope :].contiguous()
        return keys.transpose(0, 1), values.transpose(0, 1)

    def rows(
        self, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.ops.attend_rows(
            q, keys, values, q_pos, k_pos, kv_map=self.heads, scale=self.scale
        )

    def paged(self, q: Tensor, pool: Tensor, where: Paged) -> tuple[Tensor, Tensor]:
        raise AssertionError("cached latents are attended to in absorbed form")
