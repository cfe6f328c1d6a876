"""The address of a server that is to start: its port is chosen, and a conflict reported, before anything starts."""

import socket

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.process.listening import bound, socket_path, split
from sluice_server.services.process.socket_file import SocketFile


def free_address(listen: str, setting: str = "listen") -> str:
    """Returns the address to listen on, with port 0 replaced by a free port. Raises ServiceError LISTEN_FAILED naming
    `setting` if it is taken."""
    path = socket_path(listen)
    if path is not None:
        file = SocketFile(path)
        file.claim()  # the gateway claims it too; this reports a conflict before anything starts
        file.release()
        return listen
    host, port = split(setting, listen)
    flag = "--" + setting.replace("_", "-")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "LISTEN_FAILED",
                f"{flag}: cannot listen on {listen} ({error.strerror}); stop what uses it or choose another port",
                field=setting,
            ) from error
        return bound(listen, probe.getsockname()[1])
