"""Our C++ for CPUs, built where it runs, for the processor that it runs on.

NA-1: what is loaded was built from these sources, by this compiler, for this processor: a file is named by the digest.
NA-2: no compiler, or one that fails, is no error: `library` gives None, and torch does the work.
NA-3: processes that build at once don't disturb each other: a file appears under its name whole, or not at all.

Why not a wheel of binaries: the products want the widest vectors that a processor has, and a build takes seconds, once.
Built files are kept in `$XDG_CACHE_HOME/tutti` (else `~/.cache/tutti`); the compiler is `$CXX`, else `g++`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native_cpu"

_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
_SECONDS = 120.0
"""A build takes 3 on an idle core."""

_LOG = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this process, built if need be; None where it can't be (NA-2)."""
    compiler = _compiler()
    found, why = attempt(compiler)
    if found is None:
        # To have none is a choice; one that fails is not.
        level = logging.INFO if shutil.which(compiler[0]) is None else logging.WARNING
        _LOG.log(level, "%s: the torch engine computes with torch alone, more slowly", why)
    return found


def attempt(compiler: list[str] | None = None) -> tuple[ctypes.CDLL | None, str]:
    """As `library`, and where it was built or why it was not; nothing is kept or logged."""
    compiler = compiler or _compiler()
    if shutil.which(compiler[0]) is None:
        return None, "no C++ compiler (set CXX, or install g++)"
    try:
        found = _load(compiler, _folder())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        reason = getattr(error, "stderr", "") or str(error)
        return None, f"{compiler[0]} can't build {SOURCES}: {reason.strip()[-500:]}"
    return found, f"built by {compiler[0]} for this processor"


def _compiler() -> list[str]:
    """As make takes it: with options, behind a wrapper."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _load(compiler: list[str], folder: Path) -> ctypes.CDLL:
    path = folder / f"native-{_digest(compiler)}.so"
    if not path.exists():
        _build(compiler, path)
    return ctypes.CDLL(str(path))


def _build(compiler: list[str], path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        units = [str(unit) for unit in sorted(SOURCES.glob("*.cpp"))]
        _output([*compiler, *_FLAGS, *units, "-o", name], _SECONDS)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _digest(compiler: list[str]) -> str:
    made_of = [" ".join((*compiler, *_FLAGS)), _processor(), _output([*compiler, "--version"], 30.0)]
    made_of += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:24]


def _output(command: list[str], seconds: float) -> str:
    # A compiler speaks the user's language, in whatever encoding.
    return subprocess.run(command, check=True, capture_output=True, timeout=seconds, errors="replace").stdout


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in kinds}))


def _folder() -> Path:
    """Ours alone: what lies there is loaded into the process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tutti"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise OSError(
            f"{folder}: expected a folder that only its owner can write to; chmod go-w it, or set XDG_CACHE_HOME"
        )
    return folder
