"""A library of its own beside the first: one more C file, which includes skimp_native.c for its threads and numbers.

A library that exists stays valid while another changes; each is rebuilt when its own source or the first one's does.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from skimp.core.errors import SkimpError
from skimp.kernels.native import build

#: For kernels that are held to a few ulp of their references and not to their bits: a product and a sum round once.
FUSED_PRODUCTS = ("-ffp-contract=fast",)


@dataclass(eq=False)
class Beside:
    """One such library.

    Attributes:
        what: in words, for messages.
        stem: of its source, `skimp_<stem>.c` in this folder.
        signatures: argument types by function; all return nothing.
        flags: after the common ones.
    """

    what: str
    stem: str
    signatures: dict[str, list[Any]]
    flags: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        return build.SOURCE.with_name(f"skimp_{self.stem}.c")

    @property
    def library(self) -> Path:
        return build.LIBRARY.with_name(f"skimp_{self.stem}.so")

    def stamp(self) -> str:
        """Hash of both sources, flags and CPU."""
        sources = [path.read_text(encoding="utf-8") for path in (build.SOURCE, self.source)]
        flags = (*build.FLAGS, *self.flags, *build.LINK_FLAGS)
        return build.hashed(*sources, *flags, platform.machine(), build.cpu_features())

    def make(self, target: Path | None = None) -> Path:
        """Compile, to `target` where one is given.

        Raises:
            SkimpError: no compiler, a folder that cannot be written, or the compiler's own message.
        """
        found = build.compiler()
        if found is None:
            raise SkimpError(
                f"a C compiler for {self.what}", "none of $CC, cc, gcc, clang", instead="install gcc or clang"
            )
        command = [found, *build.FLAGS, *self.flags, f'-DSKIMP_STAMP="{self.stamp()}"', "-c", str(self.source)]
        return build.compile_aside(self.source, command, build.LINK_FLAGS, target or self.library)

    @cached_property
    def opened(self) -> ctypes.CDLL | None:
        """The library, None where it is not built for these sources and this CPU."""
        try:
            library = ctypes.CDLL(str(self.library))
        except OSError:
            return None
        library.skimp_stamp.restype = ctypes.c_char_p
        if library.skimp_stamp() != self.stamp().encode():
            return None
        for name, arguments in self.signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        return library

    def available(self) -> bool:
        """Whether it is built and loaded."""
        return self.opened is not None

    def __getattr__(self, name: str) -> Any:
        """Its functions.

        Raises:
            RuntimeError: it is not built.
        """
        if not name.startswith("skimp_"):
            raise AttributeError(name)
        if self.opened is None:
            raise RuntimeError(f"{self.what} called although not built: run `python -m skimp.kernels.native`")
        return getattr(self.opened, name)
