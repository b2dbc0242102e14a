"""`python -m skimp.kernels.native`: build the native kernels. Without a compiler it says so and exits 0."""

from __future__ import annotations

import sys

from skimp.core.errors import SkimpError
from skimp.kernels.native.build import build, compiler


def main() -> int:
    if compiler() is None:
        print("native kernels: no C compiler found; the torch references run, slower, with the same numbers")
        return 0
    try:
        print(f"native kernels: {build()}")
    except SkimpError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
