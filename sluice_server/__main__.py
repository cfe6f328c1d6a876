"""The command line: what the command `sluice` and `python -m sluice_server` run."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends the process at once, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the signal is ignored, as for a command that a shell runs aside
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sluice_server.services.cli.start import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
