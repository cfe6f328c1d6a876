"""What a supervisor says to operators. A service goes on where the disk is full or the reader gone."""

import sys


def complain(text: str) -> None:
    """Prints a line for operators, at once."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: the file is closed
        return


def announce(text: str) -> None:
    """Prints what a program that started the service waits for, on standard output at once; else for operators."""
    try:
        print(text, flush=True)  # at once: who waits may read one line and leave
    except (OSError, ValueError):
        sys.stdout = None  # the interpreter must not flush at exit
        complain(text)
