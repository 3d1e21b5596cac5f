"""FS-4 of runtime/forkserver.py: whose group ends with a fresh worker."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess

import msgspec
import pytest

from runtime.forkserver import PIDFD_SIGNAL_PROCESS_GROUP, ForkServer, Fresh
from tests.waiting import SECONDS


def told_by_descriptor() -> bool:
    """Whether this kernel can signal the group of a descriptor."""
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, 0, None, PIDFD_SIGNAL_PROCESS_GROUP)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    finally:
        os.close(descriptor)
    return True


@pytest.mark.skipif(not told_by_descriptor(), reason="Linux 6.9 is the first that knows it")
@pytest.mark.parametrize("early", [True, False])
def test_a_number_that_is_another_groups_by_now_harms_nobody_fs4(tmp_path, early):
    """The leader has been waited for, so that its number is free; what it left behind is killed all the same."""
    left = subprocess.Popen(
        ["sh", "-c", "sleep 60 >&- & echo $!"], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    descriptor = os.pidfd_open(left.pid)
    child = int(left.communicate()[0])
    member = os.pidfd_open(child)
    innocent = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = ForkServer(theirs, str(tmp_path))
        socket.send_fds(ours, [msgspec.msgpack.encode(Fresh(innocent.pid))], [descriptor])
        if early:
            server._hear_the_rest()
        else:
            server._serve(())
            ((known, _),) = server._poll.poll()
            server._fresh_ended(known)
    assert select.select([member], [], [], SECONDS)[0]  # it has ended
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()
    os.close(descriptor)
    os.close(member)
