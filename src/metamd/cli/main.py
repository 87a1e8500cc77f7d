"""The `metamd` command: reads the options, imports what carries them out, and turns errors into one sentence."""

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn

from metamd._version import __version__
from metamd.cli.options import HOMES, NAMED, Demo, Options
from metamd.files.progress import showing
from metamd.files.text import brief, one_line

SUCCESS, FAILED_PIPE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

DESCRIPTION = (
    "Learn an optimiser for a family of training problems and use it in PyTorch. `metamd COMMAND --help` lists the "
    "options of a command, `metamd --version` prints the version. `--quiet` with any command shows no progress."
)

NARROWEST = 40  # columns

_UNDER_A_FILE = "a folder is required where {} is or lies under a file. Choose another path, or move the file away."
_FORBIDDEN = "{} may not be read or written by this user. Choose another path, or change its permissions."
FULL = (errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else []))
ADVICE = {
    errno.ENOTDIR: _UNDER_A_FILE,
    errno.EEXIST: _UNDER_A_FILE,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "{} is on a file system that cannot be written. Choose another path.",
    errno.EISDIR: "a file is required, and {} is a folder. Name a file inside it.",
    errno.ENOENT: "there is no {}. Give the path of one that is there.",
    errno.ELOOP: "{} is a link that leads back to itself. Give the path of a file.",
    errno.ENAMETOOLONG: "the path {} is longer than the system allows. Choose a shorter one.",
    **dict.fromkeys(FULL, "no space is left where {} is. Finished parts are kept: make space, and run the command again."),
}
"""Errors of the system in words."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 on success, 2 on bad input, 130 on Ctrl-C."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Carry out a command and return its exit code.

    Example:
        >>> run(["--version"])
        metamd 0.1.0
        0
    """
    if sys.stdout is None:  # it was closed: what is printed goes nowhere
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            return run(argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 gets escapes, not an error
    try:
        if list(argv) == ["--version"]:
            print(f"metamd {__version__}", flush=True)
            return SUCCESS
        words = [word for word in argv if word != "--quiet"]
        options = parse(words)
        spoken = len(words) == len(argv)
        if spoken and isinstance(options, Demo):
            print(options.opening, file=sys.stderr, flush=True)
        with showing("always" if spoken else "never"):
            module, function = HOMES.get(type(options), (type(options).__name__.lower(), "run"))
            getattr(import_module(f"metamd.cli.{module}"), function)(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("metamd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()  # `metamd ... | head` stopped reading
        return FAILED_PIPE
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            _forget_output()
            error = ValueError(
                f"the standard output cannot be written ({error.strerror}). Make space where it goes, or send it elsewhere."
            )
        print(f"metamd: {brief(one_line(sentence(error)), 5_000)}", file=sys.stderr)
        return BAD_INPUT
    return SUCCESS


def _forget_output() -> None:
    """Send the standard output nowhere, so that nothing is flushed at exit."""
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sentence(error: ValueError | OSError) -> str:
    """What an error says; one of the system in words, with what to do.

    Example:
        >>> sentence(NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"))
        "a folder is required where 'a/b' is or lies under a file. Choose another path, or move the file away."
    """
    if not isinstance(error, OSError) or error.errno not in ADVICE or error.filename is None:
        return str(error)
    return ADVICE[error.errno].format(repr(os.fspath(error.filename)))


def parse(argv: Sequence[str]) -> Options:
    """The options that the words stand for; a word that is none exits with tyro's message and code 2."""
    import tyro

    if argv and argv[0] in NAMED:
        import_module("metamd.cli.names").fill()
    if get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)  # in less, rich goes on for ever
    return tyro.cli(
        Options,
        prog="metamd",
        description=DESCRIPTION,
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def show(record: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command: its record as one JSON object, or the text."""
    print(json.dumps(record) if as_json else text)
