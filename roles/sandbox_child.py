"""What runs inside of the sandbox before the untrusted code: a script on its own, started by `roles.sandbox`.

Imports nothing of ours, and nothing beyond the standard library. Once the filters are in place nothing can take them
off, not even code that runs as root.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
SECCOMP_MODE_FILTER, ALLOW, KILL = 2, 0x7FFF0000, 0x80000000
DENY, NO_SUCH_CALL = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

# Numbers of system calls that are denied: network, other processes, other namespaces, ways around the filter.
X86_64 = {
    "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288,
    "sendto": 44, "sendmsg": 46, "fork": 57, "vfork": 58, "clone3": 435, "execve": 59, "execveat": 322, "kill": 62,
    "tkill": 200, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "io_uring_setup": 425, "io_uring_enter": 426, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "keyctl": 250, "add_key": 248, "request_key": 249, "init_module": 175,
    "finit_module": 313, "kexec_load": 246, "reboot": 169, "setpriority": 141, "sched_setaffinity": 203,
    "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
}  # fmt: skip
AARCH64 = {
    "socket": 198, "socketpair": 199, "connect": 203, "bind": 200, "listen": 201, "accept": 202, "accept4": 242,
    "sendto": 206, "sendmsg": 211, "clone3": 435, "execve": 221, "execveat": 281, "kill": 129, "tkill": 130,
    "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438, "ptrace": 117, "process_vm_readv": 270,
    "process_vm_writev": 271, "io_uring_setup": 425, "io_uring_enter": 426, "bpf": 280, "perf_event_open": 241,
    "userfaultfd": 282, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
    "keyctl": 219, "add_key": 217, "request_key": 218, "init_module": 105, "finit_module": 273, "kexec_load": 104,
    "reboot": 142, "setpriority": 140, "sched_setaffinity": 122, "shmget": 194, "msgget": 186, "semget": 190,
    "mq_open": 180,
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0xC000003E, X86_64, 56, 234), "aarch64": (0xC00000B7, AARCH64, 220, 131)}
"""Machine -> (its number in a filter, denied calls, clone, tgkill)."""

CLONE_THREAD = 0x10000

libc = ctypes.CDLL(None, use_errno=True)


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]


def seccomp() -> None:
    """Deny calls by number; allow clone for threads alone, tgkill for this process alone."""
    arch, denied, clone, tgkill = ARCHITECTURES[platform.machine()]
    load, equal, set_bits, at_least, end = 0x20, 0x15, 0x45, 0x35, 0x06
    number, architecture, first_argument = 0, 4, 16
    lines = [
        (load, 0, 0, architecture), (equal, 1, 0, arch), (end, 0, 0, KILL),
        (load, 0, 0, number),
        (at_least, 0, 1, 0x40000000), (end, 0, 0, DENY),  # the other numbering of x86_64
        (equal, 0, 4, clone), (load, 0, 0, first_argument), (set_bits, 1, 0, CLONE_THREAD), (end, 0, 0, DENY),
        (end, 0, 0, ALLOW),
        (equal, 0, 4, tgkill), (load, 0, 0, first_argument), (equal, 1, 0, os.getpid()), (end, 0, 0, DENY),
        (end, 0, 0, ALLOW),
    ]  # fmt: skip
    for name, call in denied.items():
        # The C library tries clone3 for threads, and takes clone when that does not exist.
        lines += [(equal, 0, 1, call), (end, 0, 0, NO_SUCH_CALL if name == "clone3" else DENY)]
    lines.append((end, 0, 0, ALLOW))
    instructions = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    program = Program(len(lines), instructions)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp is refused")


def landlock(home: str) -> None:
    """Read where the interpreter lives, write in `home`, nothing else."""
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        raise OSError(ctypes.get_errno(), "this kernel has no Landlock")
    execute, write_file, read_file, read_dir = 1, 2, 4, 8
    handled = (1 << 13) - 1  # what version 1 knows: read, write, execute, make and remove anything
    if version >= 2:
        handled |= 1 << 13  # refer
    if version >= 3:
        handled |= 1 << 14  # truncate
    ruleset = libc.syscall(create, ctypes.byref(ctypes.c_uint64(handled)), 8, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock is refused")

    class Rule(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int)]

    def allow(path: str, rights: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        if not os.path.isdir(path):
            rights &= execute | write_file | read_file
        rule = Rule(rights & handled, fd)
        if libc.syscall(add, ruleset, 1, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), f"Landlock refuses {path}")
        os.close(fd)

    for path in {
        sys.prefix,
        sys.base_prefix,
        *sys.path,
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/share/zoneinfo",
    }:
        if path:
            allow(path, execute | read_file | read_dir)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        allow(path, read_file | write_file)
    allow(home, handled & ~execute)
    if libc.syscall(restrict, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock is refused")
    os.close(ruleset)


def lock_in(job: dict[str, Any]) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:
        raise OSError("whoever started this has ended")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing too much is an error of the program, not its death
    limits = {
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_FSIZE: job["file"],
        resource.RLIMIT_CPU: int(job["seconds"]) + 2,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    for lock, arguments in ((landlock, (job["home"],)), (seccomp, ())):
        try:
            lock(*arguments)
        except (OSError, KeyError) as error:
            if not job["weaker"]:
                raise OSError(f"{error}; allow less isolation to run all the same") from error


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    try:
        lock_in(job)
    except OSError as error:
        sys.stderr.write(str(error))
        sys.stderr.flush()
        os._exit(97)
    sys.argv = ["answer.py"]
    source = compile(job["code"], "answer.py", "exec")
    job.clear()
    exec(source, {"__name__": "__main__", "__builtins__": __builtins__})


main()
