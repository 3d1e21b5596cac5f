"""Which transports may fit a set of ranks, and the trial that shows whether one does."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime import DeadlineExceeded
from sync.config import SyncConfig
from sync.fleet import Seat, first_line, together
from sync.messages import Opened, OpenSpec, Side
from sync.plan import Plan
from sync.transport import TRANSPORTS, Link, SyncError, TransportError, TransportName

__all__ = ["GRACE_S", "NotOpened", "candidates", "join"]

GRACE_S = 5.0
"""How much longer than a transport's own deadline the session waits, so that the error which names the tensor wins."""


class NotOpened(SyncError):
    """A port that did not open within the deadline."""

    def __init__(self, text: str, seat: Seat) -> None:
        super().__init__(text)
        self.lost = {seat.rank.index: text} if seat.side == "rollout" else {}
        """Rollout ranks whose fault it is -> reason."""


def candidates(config: SyncConfig, sides: Sequence[Side]) -> list[tuple[TransportName, str]]:
    """Transports to try, in order, each with the reason.

    Raises:
        SyncError: ranks run on several hosts and no network interface that joins them is named.
    """
    num_hosts = len({side.host for side in sides})
    if config.transport != "auto":
        _check_interface(config, config.transport, num_hosts)
        return [(config.transport, "asked for")]
    on_gpu = all(side.device == "cuda" for side in sides)
    where = "all ranks share a host" if num_hosts == 1 else f"ranks run on {num_hosts} hosts"
    lie = "weights lie on GPUs" if on_gpu else "weights lie in host memory"
    found: list[tuple[TransportName, str]] = []
    for name, reach in TRANSPORTS.items():
        if (reach.one_host and num_hosts > 1) or (reach.device == "cuda" and not on_gpu) or name == "nixl":
            continue
        found.append((name, f"{where}, {lie}, proved by a trial"))
    _check_interface(config, found[-1][0], num_hosts)
    return found


async def join(
    name: TransportName,
    plan: Plan,
    seats: Sequence[Seat],
    sides: Sequence[Side],
    config: SyncConfig,
    *,
    in_place: bool = False,
) -> str:
    """Open the ports of all ranks and their parts, trainer ranks first; returns why it is not possible, or nothing.

    Ports that were opened stay open: whoever is refused closes them.
    """
    timeout = config.deadline_s + GRACE_S
    specs = [
        msgspec.structs.replace(_spec(name, plan, seat, side, config), in_place=in_place)
        for seat, side in zip(seats, sides, strict=True)
    ]
    try:
        address: str = await seats[0].call("sync_host", specs[0], timeout=timeout)
    except TransportError as error:
        return first_line(error)

    async def open_one(seat: Seat, spec: OpenSpec) -> Opened:
        try:
            opened: Opened = await seat.call(
                "sync_open", msgspec.structs.replace(spec, address=address), timeout=timeout
            )
        except DeadlineExceeded as error:  # one that waits for others says so before
            raise NotOpened(first_line(error), seat) from error
        return opened

    opened = await together(open_one(seat, spec) for seat, spec in zip(seats, specs, strict=True))
    for seat, answer in zip(seats, opened, strict=True):
        if answer.refused:
            return f"{seat}: {answer.refused}"
    return "the ranks don't see the same memory" if len({answer.proof for answer in opened}) > 1 else ""


def _spec(name: TransportName, plan: Plan, seat: Seat, side: Side, config: SyncConfig) -> OpenSpec:
    link = Link(
        rank=seat.number,
        num_senders=plan.num_senders,
        num_sinks=plan.num_sinks,
        buckets=plan.sent_by(seat.number) if seat.side == "trainer" else plan.received_by(seat.number),
        slots=min(config.slots, len(plan.buckets)),
        slot_bytes=plan.largest_bucket,
        deadline_s=config.deadline_s,
        interface=config.interface,
    )
    return OpenSpec(transport=name, plan_key=plan.key, layout_digest=side.digest, link=link)


def _check_interface(config: SyncConfig, name: TransportName, num_hosts: int) -> None:
    if num_hosts > 1 and config.interface == "lo" and not TRANSPORTS[name].one_host:
        raise SyncError(
            f"ranks run on {num_hosts} hosts and {name} would use the loopback interface only; set [sync] interface to "
            f"the one that joins the hosts, such as 'eth0'"
        )
