"""The layout algebra in plain integers: who holds which rows, heads, positions; which moves follow.

Standard library and numpy only, so that every layout can be examined anywhere.
"""

from anabranch.layout import ownership
from anabranch.layout.mesh import Mesh
from anabranch.layout.rows import Rows, Verb, plan_move

__all__ = ["Mesh", "Rows", "Verb", "ownership", "plan_move"]
