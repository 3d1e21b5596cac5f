"""Shared memory on one host: trainer ranks pack straight into a ring of slots, rollout ranks read them in place. Start
here to learn how a transport is written; the numbered calls are those of `sync.transport`.

Behind the counters of the page (`hostpage.py`) lies one ring per trainer rank, `slots` times `slot_bytes`. The n-th
bucket of a rank lies in slot n modulo `slots`, and is overwritten only when all its sinks have taken it: a ring that
fits into the processor's cache moves weights at nearly the speed of one copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from torch import Tensor

from sync.memory import over
from sync.plan import Bucket
from sync.transport import Link, ReceiverTransport, SenderTransport, TransportError, resized
from sync.transports.hostpage import HostPage, make_page

__all__ = ["Receiver", "Sender"]


class Sender(SenderTransport):
    """Calls 1 to 5."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._hosted: int | None = None
        self._page: HostPage | None = None

    def host(self) -> str:
        self._hosted = make_page(self.link, _rings_bytes(self.link))
        return f"/proc/{os.getpid()}/fd/{self._hosted}"

    def open(self, address: str) -> bytes:
        where = f"trainer rank {self.link.rank}"
        self._page = page = HostPage(self.link, "shm", where, address, _rings_bytes(self.link))
        return page.proof

    def buffer(self, version: int, bucket: Bucket) -> Tensor:
        page, place = _live(self._page), bucket.place
        if place >= self.link.slots:
            before = self.link.buckets[place - self.link.slots]
            page.wait_taken(before, version, place - self.link.slots + 1)
        return _slot(self.link, page, bucket)

    def put(self, version: int, bucket: Bucket) -> None:
        _live(self._page).set_packed(self.link.rank, version, bucket.place + 1)

    def drain(self, version: int) -> None:
        _live(self._page)  # what was put stays where it is until it is taken

    def abort(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            page.stop()

    def close(self) -> None:
        self.abort()
        if self._hosted is not None:
            os.close(self._hosted)
            self._hosted = None


class Receiver(ReceiverTransport):
    """Calls 2 and 6."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._page: HostPage | None = None

    def open(self, address: str) -> bytes:
        where = f"rollout rank {self.link.rank}"
        self._page = page = HostPage(self.link, "shm", where, address, _rings_bytes(self.link))
        return page.proof

    def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        for bucket in (resized(bucket, sizes) for bucket in self.link.buckets):
            page = _live(self._page)
            page.wait_packed(bucket, version, bucket.place + 1)
            yield bucket, _slot(self.link, page, bucket)
            page.set_taken(bucket.owner, self.link.rank, version, bucket.place + 1)

    def abort(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            page.stop()

    close = abort


def _rings_bytes(link: Link) -> int:
    return link.num_senders * link.slots * link.slot_bytes


def _slot(link: Link, page: HostPage, bucket: Bucket) -> Tensor:
    start = (bucket.owner * link.slots + bucket.place % link.slots) * link.slot_bytes
    return over(page.extra[start : start + bucket.num_bytes])


def _live(page: HostPage | None) -> HostPage:
    if page is None:
        raise TransportError("shm: the transport is closed; open the session again")
    return page
