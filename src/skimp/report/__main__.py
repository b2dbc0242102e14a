"""`python -m skimp.report FOLDER`: the child process; one sentence a line on what was made, or why not (code 2)."""

from __future__ import annotations

import sys
from pathlib import Path

from skimp.core.errors import SkimpError
from skimp.report.make import make

if __name__ == "__main__":
    try:
        print("\n".join(make(Path(sys.argv[1]))))
    except SkimpError as error:
        print(error.message(), file=sys.stderr)
        sys.exit(error.exit_code)
