"""Compile the native kernels with the system's C compiler: one source, one command, a few seconds."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from skimp.core.errors import SkimpError

SOURCE = Path(__file__).with_name("skimp_native.c")
LIBRARY = Path(__file__).with_name("skimp_native.so")

#: -ffp-contract=off keeps a·b + c two roundings, as in the torch references. -fno-math-errno and
#: -fno-trapping-math change no value: they allow sqrtf and selects to be vectorised.
FLAGS = (
    "-std=c11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-Wall",
    "-Wextra",
    "-fPIC",
)
#: No -fopenmp here: the runtime is the one that torch has loaded. With -z now a process without it is told at
#: loading, and runs the references, instead of stopping at the first call.
LINK_FLAGS = ("-shared", "-Wl,-z,now", "-lm")


def stamp() -> str:
    """Hash of source, flags and CPU: `-march=native` code may not run on another CPU."""
    return hashed(SOURCE.read_text(encoding="utf-8"), *FLAGS, *LINK_FLAGS, platform.machine(), cpu_features())


def hashed(*parts: str) -> str:
    """A short hash of everything a compiled library depends on."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def cpu_features() -> str:
    """The CPU's feature list where the system gives one (Linux), else nothing."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    wanted = ("flags", "Features", "isa")
    lines = (line for line in info.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((line for line in lines if line.split("\t")[0].strip() in wanted), "")


def compiler() -> str | None:
    """Path of the C compiler: `$CC`, else `gcc`, `cc` or `clang`; None when there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    return next((path for path in map(shutil.which, names) if path), None)


def build(target: Path = LIBRARY) -> Path:
    """Compile to `target`, written aside and renamed, so that a process that has the old one mapped keeps it.

    Raises:
        SkimpError: no compiler, a folder that cannot be written, or the compiler's own message.
    """
    found = compiler()
    if found is None:
        raise SkimpError(
            "a C compiler for the native kernels",
            "none of $CC, cc, gcc, clang",
            instead="install gcc or clang; without one the torch references run, with the same numbers",
        )
    compile_ = [found, *FLAGS, f'-DSKIMP_STAMP="{stamp()}"', "-c", str(SOURCE)]
    return compile_aside(SOURCE, compile_, LINK_FLAGS, target)


def compile_aside(source: Path, command: Sequence[str], link: Sequence[str], target: Path) -> Path:
    """Run `command` (compiler first, up to the source), link the object, and rename the library to `target`.

    Raises:
        SkimpError: a folder that cannot be written, or the compiler's own message.
    """
    try:
        handle, aside = tempfile.mkstemp(prefix=target.stem, suffix=".so.part", dir=target.parent)
    except OSError as error:
        raise SkimpError("a folder to build the native kernels in", f"{target.parent}: {error.strerror}") from error
    os.close(handle)
    try:
        compiled = f"{aside}.o"
        for words in ([*command, "-o", compiled], [command[0], compiled, "-o", aside, *link]):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                said = done.stderr.strip() or f"exit {done.returncode}"
                raise SkimpError(f"{source.name} compiled by {command[0]}", said)
        os.chmod(aside, 0o755)
        os.replace(aside, target)
    finally:
        Path(aside).unlink(missing_ok=True)
        Path(f"{aside}.o").unlink(missing_ok=True)
    return target
