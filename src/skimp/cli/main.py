"""The `skimp` command: one verb a file, imported only when it is called, so that `--help` answers at once.

Exit codes: 0 done or fits, 2 bad input, 3 does not fit or ran out of memory, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import os
import sys

import typer

from skimp.cli import bench, chat, completion, doctor, export, generate, init, methods, plan, report, schema, train
from skimp.cli import eval as evaluate

app = typer.Typer(
    name="skimp",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Plan, train and hand over large language models on machines that are too small.",
)
app.command("init")(init.command)
app.command("plan")(plan.command)
app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("export")(export.command)
app.command("report")(report.command)
app.command("methods")(methods.command)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.command)
app.command("schema")(schema.command)
app.command("completion")(completion.command)


def main() -> None:
    """Run the command line; a `SkimpError` is printed without a traceback and becomes its exit code.

    Any other exception is a bug of skimp's, and keeps its traceback.
    """
    from skimp.core.errors import SkimpError

    # The file decides, not the width of a pipe: transformers' notes about configs are not for this screen.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        parser = typer.main.get_command(app)
        for parameter in parser.params:
            if parameter.name in ("install_completion", "show_completion"):
                parameter.hidden = True  # type: ignore[attr-defined]  # `skimp completion` has the scripts that know `=`
        parser(prog_name="skimp")
    except SkimpError as error:
        print(f"skimp: {error.message()}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
