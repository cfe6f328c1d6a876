"""The command line as `python -m sluice_server`: the same as the command `sluice`."""

from sluice_server.services.cli.main import main

main()
