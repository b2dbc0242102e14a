"""The pool: torch's CPU tensors from an allocator that keeps freed blocks for the next ones, within a limit.

`skimp_pool.cpp` says how it works. It is compiled against the headers of the torch that is installed, and only used
with that very torch. Without it the C library's allocator serves, under a policy of `core.memory.process`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from skimp.core.errors import SkimpError
from skimp.kernels.native.build import compile_aside, hashed

SOURCE = Path(__file__).with_name("skimp_pool.cpp")
LIBRARY = Path(__file__).with_name("skimp_pool.so")
#: Bytes from which a tensor is the pool's (`kSmallest` of the source); smaller ones are the C library's.
SMALLEST = 64 << 10
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra")


@dataclass(frozen=True)
class PoolStatistics:
    """Bytes of live and of waiting blocks, the highest of their sum, blocks mapped and reused, and the limit."""

    live: int
    waiting: int
    highest: int
    mapped: int
    reused: int
    limit: int


def compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, else `g++` or `clang++`; None when there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


def stamp() -> str:
    """Hash of the source, the flags and the torch build whose headers it was compiled with."""
    built = f"{torch.__version__} {torch.version.git_version} {torch.compiled_with_cxx11_abi()}"
    return hashed(SOURCE.read_text(encoding="utf-8"), *FLAGS, platform.machine(), built)


def build(target: Path = LIBRARY) -> Path:
    """Compile to `target`, a few seconds.

    Raises:
        SkimpError: no C++ compiler, another system than Linux with glibc, or the compiler's own message.
    """
    found = compiler()
    if found is None or platform.libc_ver()[0] != "glibc":
        raise SkimpError(
            "a C++ compiler for the tensor pool" if found is None else "the tensor pool",
            "none of $CXX, g++, clang++" if found is None else "a system without glibc",
            instead="install g++; without the pool the C library's allocator serves, slower or with more memory",
        )
    home = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [found, *FLAGS, abi, f'-DSKIMP_STAMP="{stamp()}"', "-isystem", str(home / "include"), "-c", str(SOURCE)]
    link = ["-shared", f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    return compile_aside(SOURCE, command, link, target)


def open_pool(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """(library, "") or (None, the reason why it is not used)."""
    how = "run `python -m skimp.kernels.native` (the C library's allocator serves meanwhile)"
    if not path.exists():
        return None, f"not built: {how}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"cannot be loaded ({error}): {how}"
    library.skimp_pool_stamp.restype = ctypes.c_char_p
    if library.skimp_pool_stamp() != stamp().encode():
        return None, f"built from another source or for another torch: {how}"
    library.skimp_pool_limit.argtypes = [ctypes.c_longlong]
    library.skimp_pool_statistics.argtypes = [ctypes.c_void_p]
    return library, ""


@cache
def _opened() -> tuple[ctypes.CDLL | None, str]:
    return open_pool(LIBRARY)


def available() -> bool:
    """True when the pool is built for this source and this torch."""
    return _opened()[0] is not None


def why() -> str:
    """Why it is not available; empty when it is."""
    return _opened()[1]


def _library() -> ctypes.CDLL:
    library, reason = _opened()
    if library is None:
        raise SkimpError("the tensor pool", reason, instead="exact.malloc=return")
    return library


def install(limit: int) -> None:
    """Give CPU tensors of 64 KiB and more, made from now on, blocks of the pool.

    Args:
        limit: bytes that live and waiting blocks may take together; live ones alone may exceed it, nothing waits then.

    Raises:
        SkimpError: it is not built.
    """
    library = _library()
    library.skimp_pool_limit(limit)
    library.skimp_pool_install()
    library.skimp_pool_reset_highest()


def set_limit(limit: int) -> None:
    """Change the limit; what waits beyond it is unmapped now."""
    _library().skimp_pool_limit(limit)


def remove() -> None:
    """Torch's own allocator again. What waits is unmapped; live blocks are, one by one, when they are freed."""
    library = _library()
    library.skimp_pool_remove()
    library.skimp_pool_limit(0)


def statistics() -> PoolStatistics:
    """What the pool holds and did."""
    values = (ctypes.c_longlong * 6)()
    _library().skimp_pool_statistics(ctypes.addressof(values))
    return PoolStatistics(*values)
