"""`python -m skimp.kernels.native`: build kernels and tensor pool. Without a compiler it says so and exits 0."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

from skimp.core.errors import SkimpError
from skimp.kernels.native import build, pool
from skimp.kernels.native.derivative import DERIVATIVE
from skimp.kernels.native.four_bit import FOUR_BIT
from skimp.kernels.native.layers import LAYERS
from skimp.kernels.native.nf4 import NF4
from skimp.kernels.native.sparse import SPARSE


def main() -> int:
    code = 0
    if build.compiler() is None:
        print("native kernels: no C compiler found; the torch references run, slower, with the same numbers")
    else:
        code = _built("native kernels", build.build)
        for beside in (FOUR_BIT, LAYERS, NF4, SPARSE, DERIVATIVE):
            code = max(code, _built(beside.what, beside.make))
    if pool.compiler() is None:
        print("tensor pool: no C++ compiler found; the C library's allocator serves, slower or with more memory")
    elif platform.libc_ver()[0] == "glibc":
        code = max(code, _built("tensor pool", pool.build))
    return code


def _built(what: str, make: Callable[[], Path]) -> int:
    try:
        print(f"{what}: {make()}")
    except SkimpError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
