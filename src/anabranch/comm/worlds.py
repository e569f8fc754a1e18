"""From an endpoint to this rank's world: how it reaches the other ranks of its model copy."""

from typing import Protocol

from anabranch.comm.group import Transport


class World(Protocol):
    """The ranks of one model copy, as one of them sees them."""

    def transport(self, members: tuple[int, ...], me: int) -> Transport:
        """The transport of one group; every member asks for its groups in the same order."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it (the `wait` of `weights.share.ProcessShare`)."""
        ...

    def abort(self) -> None:
        """Called by a rank that failed, so that the others do not wait for it."""
        ...


def open_world(
    endpoint: str, rank: int, size: int, timeout: float = 120.0, threads: int | None = None
) -> World:
    """Join as `rank` of `size`; returns when all have. See `comm.endpoint` for the text's forms.

    timeout: seconds a wait may last, here and in every verb; past it `CommError` names the peer.
    threads: of this rank, for copies and sums; None: as many as its array library uses. A rank sets
    its core mask before it joins.
    """
    kind, _, rest = endpoint.partition(":")
    if kind == "shm":
        from anabranch.comm.transports.shm import ShmWorld

        fd, _, nonce = rest.partition(":")
        return ShmWorld(int(fd), bytes.fromhex(nonce), rank, size, timeout, threads=threads)
    if kind == "gloo":
        from anabranch.comm.transports.gloo import GlooWorld, file_store, url_store

        if rest.isdigit():
            return GlooWorld(file_store(int(rest), size), rank, size, timeout)
        return GlooWorld(url_store(rest, rank, size, timeout), rank, size, timeout)
    raise ValueError(f"endpoint {endpoint!r}; it starts with shm: or gloo:")
