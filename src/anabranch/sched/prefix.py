"""Which page holds which prefix: content hashes of full pages, one map per replica.

The hash of page i is SHA-256 over the hash of page i-1 and the page's token ids, so equal hashes
mean equal tokens from position 0 on. Knows nothing of holders or requests; pages.py decides what is
reused.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], pages: int, page_size: int) -> None:
    """Append hashes until the first `pages` pages of `tokens` have one; all must be full."""
    assert pages * page_size <= len(tokens), f"{pages} pages are not full at {len(tokens)} tokens"
    for i in range(len(hashes), pages):
        ids = array("i", tokens[i * page_size : (i + 1) * page_size]).tobytes()
        hashes.append(sha256((hashes[-1] if hashes else b"") + ids).digest())


class PrefixCache:
    """hash -> page, and back."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of `hashes`."""
        pages = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, digest: bytes, page: int) -> bool:
        """Page now holds this content; False if another page already does (the first one stays)."""
        if digest in self._page_of:
            return self._page_of[digest] == page
        assert page not in self._hash_of, f"page {page} is cached under two hashes"
        self._page_of[digest] = page
        self._hash_of[page] = digest
        return True

    def forget(self, page: int) -> None:
        """The page is about to be overwritten."""
        del self._page_of[self._hash_of.pop(page)]

    def clear(self) -> None:
        """No page holds anything usable any more (the weights changed)."""
        self._page_of.clear()
        self._hash_of.clear()

    def __len__(self) -> int:
        return len(self._page_of)
