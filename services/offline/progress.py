"""Shows a progress bar for a batch on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(total: int, *, is_on: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes the number of ended prompts and of their tokens. Shows nothing without a terminal."""
    if not is_on or not sys.stderr.isatty():
        yield lambda num_ended, num_tokens: None
        return
    # Imported here, so that calls without a bar do not wait for the import.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("prompts", total=total, tokens=0)
        yield lambda num_ended, num_tokens: progress.update(task, completed=num_ended, tokens=num_tokens)
