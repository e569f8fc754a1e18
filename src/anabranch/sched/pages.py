"""Pages of one replica: who holds which, and which may be given away next.

Owns reference counts and the order of reuse. Knows nothing of what a page contains: a page that is
`kept` has content worth a later hit and is given away only after all pages that have none.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PagePool:
    """`total` pages, each free, held by one or more sequences, or idle (held by none, but kept).

    on_evict is called with the id of an idle page just before it is given to someone else.
    """

    def __init__(self, total: int, on_evict: Callable[[int], None]) -> None:
        if total < 1:
            raise ValueError(f"a replica needs at least 1 page, got {total}")
        self.total = total
        self._on_evict = on_evict
        self._holders = [0] * total
        self._kept = bytearray(total)
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages: free ones first, then idle ones, least recently used first."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _none = self._idle.popitem(last=False)
                self._kept[page] = 0
                self._on_evict(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each page; idle pages come back into use."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def idle_among(self, pages: Sequence[int]) -> int:
        """How many of `pages` nobody holds: sharing them takes them out of `available`."""
        return sum(self._holders[page] == 0 for page in pages)

    def keep(self, page: int) -> None:
        """The page's content is worth a later hit: when its last holder leaves it turns idle."""
        assert self._holders[page] > 0, f"page {page} is kept but nobody holds it"
        self._kept[page] = 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each. The tail of a sequence becomes reusable before its head."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} released more often than held"
            if self._holders[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def drop_kept(self) -> None:
        """Forget that any content is worth keeping; idle pages become free."""
        self._kept = bytearray(self.total)
        while self._idle:
            page, _none = self._idle.popitem(last=False)
            self._on_evict(page)
            self._free.append(page)
