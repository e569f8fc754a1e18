"""The room of kernels: every op is a torch reference, and faster providers held to it.

Owns the choice of a provider per op, made once per device by ``bind``. Knows nothing of ranks,
plans or models.
"""

from anabranch.ops.table import Choice, Op, Ops, Provider, bind, describe

__all__ = ["Choice", "Op", "Ops", "Provider", "bind", "describe"]
