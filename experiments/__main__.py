"""``python -m experiments [STUDY] [OPTIONS]``: run one study; without a name, ``compare``.

Exit codes: 0 done, 1 a fault of the program (with traceback), 2 a request that cannot be met (one
line on standard error), 130 stopped by Ctrl-C or SIGTERM (finished work is kept, ``--resume`` goes
on with it).
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import tyro

from experiments.arguments import check_arguments
from experiments.errors import UsageError
from experiments.options import StudyOptions
from experiments.runs import taken_up
from experiments.studies import STUDIES

PROGRAM = "python -m experiments"
DEFAULT_STUDY = "compare"
DESCRIPTION = f"""\
Train, measure and compare attention mechanisms. Each study writes results.json, figures and
report.html into runs/<study>/<time>, or exactly into --out. Without a study's name, {DEFAULT_STUDY}
runs. {PROGRAM} STUDY --help tells what a study asks, and its options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study that ``arguments`` ask for and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, DEFAULT_STUDY)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        options = parse(arguments)
        options = taken_up(options) if options.resume else options.resolved()
        options.run()
    except UsageError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> StudyOptions:
    """Return the options of the study named by ``arguments[0]``.

    Raises:
        UsageError: the command line is not understood; the message is one line.
        SystemExit: help was asked for and printed.
    """
    if arguments[0] not in ("-h", "--help"):
        check_arguments(arguments, STUDIES)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                dict(STUDIES), prog=PROGRAM, description=DESCRIPTION, args=list(arguments)
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(_one_line(errors.getvalue())) from None


def _one_line(panel: str) -> str:
    """Return the message of one of tyro's boxed panels as one line, without the box."""
    lines = []
    for line in panel.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if text.startswith(("For full helptext", "Argument helptext")):
            break
        if text.strip("─ ") and not line.startswith(("╭", "╰")):
            lines.append(text)
    return f"{' '.join(lines)}; see {PROGRAM} --help" if lines else f"see {PROGRAM} --help"


def _refuse(error: Exception) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
