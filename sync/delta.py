"""What changed between two versions of a bucket: positions as gaps, values as they are. Pure, on host memory.

Packed bytes are compared, so in the dtype of the wire: an optimizer step at a learning rate of 1e-6 changes 3 % of the
words of bfloat16 weights and 0.3 % of 8-bit codes.

    | count of changes, u32 | count of gaps, u32 | gaps, u16 each | values, one unit each |

The n-th value belongs at the sum of the first n gaps; a gap of FAR says "65535 further" and has no value. A unit is
UNIT bytes: two 8-bit codes, one bfloat16, half a float32.

DE-1: applying a delta to the bytes that it was made against gives the new bytes exactly, however many follow each
      other.
DE-2: a delta names no base: whoever applies it must hold the bytes of that version, and the digests of the result,
      which are those of the new bytes, tell when it does not.
DE-3: a delta is made only where it is smaller than the bytes themselves by `gain`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FAR", "REBUILD", "UNIT", "apply", "difference", "worth"]

UNIT = 2
"""Bytes compared and sent together."""
FAR = 0xFFFF
REBUILD = 1.5e9
"""Bytes per second at which one core puts old bytes and a difference together, and hashes them."""

Bytes = npt.NDArray[np.uint8]


def worth(size: int, whole: int, rate: float) -> bool:
    """Whether a difference of `size` bytes arrives sooner than the `whole`, on a link of `rate` bytes per second.

    It saves (whole - size) / rate on the wire and costs a rebuilding of the whole, at REBUILD bytes per second. 0 means
    that the rate is not known yet: no.
    """
    return 0 < rate < REBUILD * (whole - size) / whole


def difference(before: Bytes, after: Bytes, *, gain: float = 0.5) -> Bytes | None:
    """The delta from `before` to `after`, or None where it would be larger than `gain` times the bytes.

    Args:
        before, after: flat, of one length, a multiple of UNIT.

    Raises:
        ValueError: the lengths differ, or are no multiple of UNIT.
    """
    if len(before) != len(after) or len(after) % UNIT:
        raise ValueError(f"delta: {len(before)} and {len(after)} bytes: expected equal multiples of {UNIT}")
    new = after.view(np.uint16)
    changed = np.flatnonzero(before.view(np.uint16) != new)
    steps = np.diff(changed, prepend=0)
    far = steps // FAR
    size = 8 + 2 * (len(changed) + int(far.sum())) + UNIT * len(changed)
    if size > gain * len(after):
        return None
    gaps = np.full(len(changed) + int(far.sum()), FAR, np.uint16)
    gaps[np.arange(len(changed)) + np.cumsum(far)] = steps % FAR
    found = np.empty(size, np.uint8)
    found[:8].view(np.uint32)[:] = len(changed), len(gaps)
    found[8 : 8 + gaps.nbytes] = gaps.view(np.uint8)
    found[8 + gaps.nbytes :] = new[changed].view(np.uint8)
    return found


def apply(delta: Bytes, into: Bytes) -> None:
    """Turn the bytes that a delta was made against into the new ones, in place.

    Raises:
        ValueError: the delta is cut short or leads outside of `into`.
    """
    if len(delta) < 8:
        raise ValueError(f"delta: {len(delta)} bytes are no delta")
    count, num_gaps = (int(n) for n in delta[:8].view(np.uint32))
    if len(delta) < 8 + 2 * num_gaps + UNIT * count:
        raise ValueError(f"delta: {len(delta)} bytes, its head tells of {count} changes and {num_gaps} gaps")
    gaps = delta[8 : 8 + 2 * num_gaps].view(np.uint16)
    places = np.cumsum(gaps.astype(np.int64))[gaps != FAR]
    words = into.view(np.uint16)
    if len(places) != count or (count and int(places[-1]) >= len(words)):
        raise ValueError(f"delta: {count} changes at {len(places)} places do not fit {len(into)} bytes")
    values = delta[8 + 2 * num_gaps : 8 + 2 * num_gaps + UNIT * count].view(np.uint16)
    words[places] = values
