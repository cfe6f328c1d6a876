"""What a supervisor says to operators."""

import sys


def complain(text: str) -> None:
    """Prints a line for operators, at once."""
    print(text, file=sys.stderr, flush=True)
