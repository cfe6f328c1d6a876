"""The lines for operators about processes that ended without being asked to."""

from sluice_server.services.supervisor.children import Running


def exit_line(child: Running, how: str, wait_s: float | None, back: tuple[str, str, int] | None) -> str:
    """Returns the line about an end. `wait_s`: until the next start; None if there is none. `back`: what to put back
    and what to do then, and how many starts are left behind the next, if the process is not back from a restart."""
    soon = f" in {wait_s:.1f} s" if wait_s else ""
    if back is None:
        what = "its group" if child.child.group else "it"
        again = ", too often; the service ends" if wait_s is None else f"; starting {what} again{soon}"
        return f"sluice: {how}{again}"
    what, then, num_left = back
    if wait_s is None:
        return f"sluice: {how}, too often; the service ends. To go back: put back {what} and {then}"
    return (
        f"sluice: {how} and is not back from the restart that was asked for; starting it again{soon}. To go back: "
        f"put back {what}; the next start takes it. Starts left: {1 + num_left}, then the service ends"
    )
