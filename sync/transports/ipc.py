"""GPUs of one host, by copy engines: trainer ranks pack into a ring in GPU memory, rollout ranks pull from it over
NVLink (or xGMI, PCIe) while they decode. The numbered calls are those of `sync.transport`.

As in `shm` a page of host memory holds the counters of who has packed and taken what; beside them each trainer rank
puts the handle of its ring, which rollout ranks map once. A bucket is pulled by one asynchronous copy into one of two
buffers here, so that no multiprocessor is taken from decoding while bytes are on the way.

IP-1: a bucket counts as packed when the GPU has written it, and as taken when the copy has left the ring: counters move
      after events, never after launches.
IP-2: rings are allocated and mapped in `open`, with the driver and not from torch's pool, so that a handle is exactly
      one ring, and nothing is allocated while a version moves (TR-7).
IP-3: nobody waits while holding back what he could tell: counters may lag one bucket behind the GPU, so that the next
      one is made ready meanwhile, but never while their rank waits for another one (HP-2).
IP-4: where both share a GPU nothing is pulled: rollout ranks read the ring in place.
IP-5: a trainer rank frees its ring when all that mapped it have let go or ended, or else leaves it to the end of its
      process.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sync.plan import ALIGN, Bucket
from sync.transport import Link, ReceiverTransport, SenderTransport, TransportError, resized, wait_until
from sync.transports.hostpage import HostPage, make_page

__all__ = ["Receiver", "Sender"]

_PID = struct.Struct("<q")
_HANDLE_BYTES, _GPU_BYTES = 64, 48
_RECORD_BYTES = _HANDLE_BYTES + ALIGN
"""Of each trainer rank in the page: its handle, a byte that says that it is there, and which GPU it is."""


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _HANDLE_BYTES)]


class _Driver:
    """The five calls of the CUDA runtime, or of HIP, that torch does not offer."""

    def __init__(self) -> None:
        hip = torch.version.hip is not None
        self._prefix = "hip" if hip else "cuda"
        self._library = ctypes.CDLL(_loaded("libamdhip64" if hip else "libcudart"))

    def allocate(self, num_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("Malloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return int(pointer.value or 0)

    def free(self, pointer: int) -> None:
        self._call("Free", ctypes.c_void_p(pointer))

    def handle(self, pointer: int) -> bytes:
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(memoryview(handle))

    def map(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        lazy_peer_access = ctypes.c_uint(1)
        self._call("IpcOpenMemHandle", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), lazy_peer_access)
        return int(pointer.value or 0)

    def unmap(self, pointer: int) -> None:
        self._call("IpcCloseMemHandle", ctypes.c_void_p(pointer))

    def copy(self, target: Tensor, source: int, num_bytes: int) -> None:
        """On the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        kind = ctypes.c_int(4)  # wherever the pointers say
        size = ctypes.c_size_t(num_bytes)
        self._call("MemcpyAsync", ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source), size, kind, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        torch.cuda.current_stream()  # the device's context exists from here on
        code = getattr(self._library, self._prefix + name)(*arguments)
        if code:
            raise TransportError(f"ipc: {self._prefix}{name} failed with error {code}")


class _Ring:
    """Memory of the driver, as a tensor."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


class Sender(SenderTransport):
    """Calls 1 to 5."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._hosted: int | None = None
        self._page: HostPage | None = None
        self._driver: _Driver | None = None
        self._pointer = 0
        self._ring: Tensor | None = None
        self._launched: deque[tuple[int, int, torch.cuda.Event]] = deque()
        """(version, count, when the GPU has written it) of buckets that were put and not announced yet."""

    def host(self) -> str:
        self._hosted = make_page(self.link, _page_bytes(self.link))
        return f"/proc/{os.getpid()}/fd/{self._hosted}"

    def open(self, address: str) -> bytes:
        where = f"trainer rank {self.link.rank}"
        self._page = page = HostPage(self.link, "ipc", where, address, _page_bytes(self.link))
        if self.link.buckets:
            num_bytes = min(self.link.slots, len(self.link.buckets)) * self.link.slot_bytes
            self._driver = driver = _Driver()
            self._pointer = driver.allocate(num_bytes)
            self._ring = torch.as_tensor(_Ring(self._pointer, num_bytes), device="cuda")
            record = _record(page, self.link.rank)
            record[:_HANDLE_BYTES] = driver.handle(self._pointer)
            record[_HANDLE_BYTES + 1 : _HANDLE_BYTES + 1 + _GPU_BYTES] = _this_gpu()
            record[_HANDLE_BYTES] = 1
        return page.proof

    def buffer(self, version: int, bucket: Bucket) -> Tensor:
        page, slots = _live(self._page), self.link.slots
        if bucket.place >= slots:
            before = self.link.buckets[bucket.place - slots]
            if not page.have_taken(before, version, bucket.place - slots + 1):
                self._announce(keep=0)
            page.wait_taken(before, version, bucket.place - slots + 1)
        assert self._ring is not None
        start = bucket.place % slots * self.link.slot_bytes
        return self._ring[start : start + bucket.num_bytes]

    def put(self, version: int, bucket: Bucket) -> None:
        _live(self._page)
        self._launched.append((version, bucket.place + 1, torch.cuda.current_stream().record_event()))
        self._announce(keep=0 if bucket.place + 1 == len(self.link.buckets) else 1)

    def _announce(self, *, keep: int) -> None:
        while len(self._launched) > keep:
            version, count, written = self._launched.popleft()
            written.synchronize()
            _live(self._page).set_packed(self.link.rank, version, count)

    def drain(self, version: int) -> None:
        _live(self._page)

    def abort(self) -> None:
        if self._page is not None:
            self._page.stop()

    def close(self) -> None:
        self.abort()
        page, self._page, self._ring = self._page, None, None
        if self._driver is not None and self._pointer and page is not None:
            sinks = {sink for bucket in self.link.buckets for sink in bucket.sinks}
            users = [_user(page, self.link, sink) for sink in sinks]
            if wait_until(lambda: not any(map(_is_alive, users)), 1.0):
                self._driver.free(self._pointer)
            self._pointer = 0
        if self._hosted is not None:
            os.close(self._hosted)
            self._hosted = None


class Receiver(ReceiverTransport):
    """Calls 2 and 6."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._page: HostPage | None = None
        self._driver: _Driver | None = None
        self._rings: dict[int, int] = {}
        """Trainer rank -> where its ring is mapped here."""
        self._here: dict[int, Tensor] = {}
        """Trainer rank on this GPU -> its ring."""
        self._staging: list[Tensor] = []

    def open(self, address: str) -> bytes:
        where = f"rollout rank {self.link.rank}"
        self._page = page = HostPage(self.link, "ipc", where, address, _page_bytes(self.link))
        self._driver = driver = _Driver()
        _PID.pack_into(_user(page, self.link, self.link.rank), 0, os.getpid())
        for owner in sorted({bucket.owner for bucket in self.link.buckets}):
            record = _record(page, owner)
            if not wait_until(partial(_is_there, record), self.link.deadline_s):
                raise TransportError(f"ipc: {where}: trainer rank {owner} has not offered its memory")
            self._rings[owner] = driver.map(bytes(record[:_HANDLE_BYTES]))
            if bytes(record[_HANDLE_BYTES + 1 : _HANDLE_BYTES + 1 + _GPU_BYTES]) == _this_gpu():
                num_bytes = self.link.slots * self.link.slot_bytes
                self._here[owner] = torch.as_tensor(_Ring(self._rings[owner], num_bytes), device="cuda")
        apart = 2 if self._rings.keys() - self._here.keys() else 0
        self._staging = [torch.empty(self.link.slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(apart)]
        return page.proof

    def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        """Two streams: copies run ahead of what the caller does with the bucket before."""
        page, caller, copies = _live(self._page), torch.cuda.current_stream(), _copy_stream()
        begun: deque[tuple[Bucket, Tensor, torch.cuda.Event | None]] = deque()
        used: deque[tuple[Bucket, torch.cuda.Event]] = deque()
        """What the caller has used, or will have when the event has passed."""

        def given() -> Iterator[tuple[Bucket, Tensor]]:
            bucket, memory, copied = begun.popleft()
            if copied is not None:
                copied.synchronize()
                page.set_taken(bucket.owner, self.link.rank, version, bucket.place + 1)
            yield bucket, memory
            used.append((bucket, caller.record_event()))

        def let_go() -> None:
            bucket, event = used.popleft()
            if bucket.owner in self._here:
                event.synchronize()
                page.set_taken(bucket.owner, self.link.rank, version, bucket.place + 1)
            else:
                copies.wait_event(event)

        for count, bucket in enumerate(resized(bucket, sizes) for bucket in self.link.buckets):
            if not page.has_packed(bucket, version, bucket.place + 1):  # IP-3
                while begun:
                    yield from given()
                while any(b.owner in self._here for b, _ in used):
                    let_go()
            page.wait_packed(bucket, version, bucket.place + 1)
            while len(used) + len(begun) >= 2:
                if not used:
                    yield from given()
                let_go()
            begun.append(self._begin(bucket, count, copies))
            if len(begun) == 2:
                yield from given()
        while begun:
            yield from given()
        caller.synchronize()
        while used:
            let_go()

    def abort(self) -> None:
        if self._page is not None:
            self._page.stop()

    def close(self) -> None:
        self.abort()
        page, self._page, self._staging, self._here = self._page, None, [], {}
        if self._driver is not None and page is not None:
            torch.cuda.synchronize()
            for pointer in self._rings.values():
                self._driver.unmap(pointer)
            self._rings = {}
            _PID.pack_into(_user(page, self.link, self.link.rank), 0, 0)

    def _begin(
        self, bucket: Bucket, count: int, stream: torch.cuda.Stream
    ) -> tuple[Bucket, Tensor, torch.cuda.Event | None]:
        """Begin to pull a bucket, or find it in place (IP-4)."""
        assert self._driver is not None
        start = bucket.place % self.link.slots * self.link.slot_bytes
        if bucket.owner in self._here:
            return bucket, self._here[bucket.owner][start : start + bucket.num_bytes], None
        memory = self._staging[count % 2][: bucket.num_bytes]
        with torch.cuda.stream(stream):
            self._driver.copy(memory, self._rings[bucket.owner] + start, bucket.num_bytes)
            return bucket, memory, stream.record_event()


_COPY_STREAMS: dict[int, torch.cuda.Stream] = {}


def _copy_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _COPY_STREAMS:
        _COPY_STREAMS[device] = torch.cuda.Stream()
    return _COPY_STREAMS[device]


def _this_gpu() -> bytes:
    """Which GPU of the host this is, whatever its number here."""
    name = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return name.encode()[:_GPU_BYTES].ljust(_GPU_BYTES)


def _page_bytes(link: Link) -> int:
    return link.num_senders * _RECORD_BYTES + link.num_sinks * ALIGN


def _record(page: HostPage, sender: int) -> memoryview:
    return page.extra[sender * _RECORD_BYTES : (sender + 1) * _RECORD_BYTES]


def _user(page: HostPage, link: Link, sink: int) -> memoryview:
    """The process of a rollout rank while it has rings mapped, else 0."""
    start = link.num_senders * _RECORD_BYTES + sink * ALIGN
    return page.extra[start : start + _PID.size]


def _is_alive(user: memoryview) -> bool:
    """Whether there is a user. One that was killed has not said so, and has nothing mapped any more."""
    (pid,) = _PID.unpack_from(user)
    try:
        return pid != 0 and Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return False


def _is_there(record: memoryview) -> bool:
    return record[_HANDLE_BYTES] == 1


def _loaded(name: str) -> str:
    """Path of a library that torch has loaded into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(rf"\S*/{name}[^/]*\.so\S*", line)
        if found:
            return found.group()
    raise TransportError(f"ipc: torch has not loaded {name} here; this build of torch has no GPU support")


def _live(page: HostPage | None) -> HostPage:
    if page is None:
        raise TransportError("ipc: the transport is closed; open the session again")
    return page
