"""Runs a command-line tool of another language."""

import subprocess
from pathlib import Path


def run(*command: str, cwd: Path | None = None) -> str:
    """Runs the command, which must succeed, and returns its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
