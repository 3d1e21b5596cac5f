"""The seed of a completion. Apart from `sampling.py`, so that a controller makes seeds without torch."""

from __future__ import annotations

import hashlib
import struct


def completion_seed(job_seed: int, position: int, sample: int, attempt: int = 0) -> int:
    """The seed of one completion, in [0, 2**64): a hash of whose completion it is, never of when or where it runs.

    Args:
        job_seed: seed of the run; any integer of 64 bits.
        position: place of the prompt in the stream.
        sample: index of the completion in its group.
        attempt: how often this prompt was issued before; a re-issued prompt draws new numbers.
    """
    packed = struct.pack("<QQQQ", *(value % 2**64 for value in (job_seed, position, sample, attempt)))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"tutti-completion").digest(), "little")
