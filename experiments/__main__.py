"""``python -m experiments [STUDY] [OPTIONS]``: run one study; without a name, ``compare``.

Exit codes: 0 done, 1 a fault of the program (with traceback), 2 a request that cannot be met (one
line on standard error), 130 stopped by Ctrl-C or SIGTERM (finished work is kept, ``--resume`` goes
on with it).
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.core import stop  # all else is imported when signals are handled

if TYPE_CHECKING:
    from experiments.core.settings import StudyOptions

PROGRAM = "python -m experiments"
DEFAULT_STUDY = "compare"
DESCRIPTION = f"""\
Train, measure and compare attention mechanisms. Each study writes results.json, figures and
report.html into runs/<study>/<time>, or exactly into --out. Without a study's name, {DEFAULT_STUDY}
runs. {PROGRAM} STUDY --help tells what a study asks, and its options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study named in ``arguments`` and return the exit code."""
    from experiments import files
    from experiments.core import run
    from experiments.errors import UsageError

    with stop.signals():
        run.forget()
        try:
            _main(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
        except UsageError as error:
            return _end(2, "error: " + " ".join(files.short(w, 120) for w in str(error).split()))
        except KeyboardInterrupt:
            return _end(130, *_stopped(run.resume_command()))
        except Exception as error:
            refused = files.refusal(error)
            if refused is None:
                raise
            return _end(2, f"error: {refused}", run.resume_command())
    return 0


def _main(arguments: list[str]) -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before the process began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        # A terminal may lack the characters of a name; a stop flushes nothing.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, DEFAULT_STUDY)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    options = parse(arguments)
    if options.resume:
        from experiments.core.arguments import given
        from experiments.core.run import resume_options

        options = resume_options(options, given(arguments, options))
    else:
        options = options.resolved()
    stop.check()
    if options.coordinator is not None:
        from experiments.core import mesh

        mesh.join(options.coordinator, options.processes, options.process)
    options.run()


def parse(arguments: Sequence[str]) -> "StudyOptions":
    """Return the options of the study named by ``arguments[0]``.

    Raises:
        UsageError: the command line is invalid; the message is one line.
        SystemExit: help was requested and printed.
    """
    import contextlib
    import io
    import warnings

    import tyro

    from experiments.core.arguments import check_arguments
    from experiments.errors import UsageError
    from experiments.studies import STUDIES

    if arguments[0] not in ("-h", "--help"):
        check_arguments(arguments, STUDIES)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fields that a preset fills, which are None here
            return tyro.extras.subcommand_cli_from_dict(
                dict(STUDIES), prog=PROGRAM, description=DESCRIPTION, args=list(arguments)
            )
    except SystemExit as end:
        if end.code in (0, None):
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


def _end(code: int, reason: str, command: str | None = None) -> int:
    """Print why the program ends, in one line, and return the exit code."""
    line = _line(reason, command)
    with stop.held():
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # closed, or full: Python would try again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(line, file=sys.stderr, flush=True)
    return code


def _stopped(command: str | None) -> tuple[str, str | None]:
    return ("stopped" if command else "stopped before anything was begun"), command


def _line(reason: str, command: str | None) -> str:
    """Return one printable line: why the program ends, and the command that resumes the run."""
    if command is not None:
        reason += f"; what was finished is kept, go on with: {command}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(reason.split()))


def _leave() -> None:
    """End the process at once, from the thread that waits for signals."""
    run = sys.modules.get("experiments.core.run")  # this thread waits for no import
    resume_command = getattr(run, "resume_command", None)
    reason, command = _stopped(resume_command() if resume_command else None)
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # the cursor, which a live bar hides
    os.write(2, f"{_line(reason, command)}\n".encode(errors="backslashreplace"))
    os._exit(130)


if __name__ == "__main__":
    stop.end_process_with(_leave)
    code = main()
    if code:
        os._exit(code)  # threads that still compile or write would be waited for, and report
    sys.exit(code)
