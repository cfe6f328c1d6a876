"""Runs in a network namespace whose every address leads to a listener, and fetches what must not be fetched.

Prints JSON: what became of each URL, how many connections came meanwhile, and how many when the check of addresses is
off. `test_fetching_namespace` makes the namespace.
"""

import contextlib
import json
import socket
import sys
import threading
from unittest import mock

from sluice_server.services.media import fetching
from sluice_server.services.media.fetching import Fetcher, FetchError

MAX_BYTES, SECONDS = 1 << 20, 2.0


class Listener:
    """Takes connections at some ports of all addresses, counts and closes them."""

    def __init__(self, *ports: int) -> None:
        self.came: list[str] = []
        for port in ports:
            taking = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            threading.Thread(target=self._take, args=(taking,), daemon=True).start()

    def _take(self, taking: socket.socket) -> None:
        while True:
            connection, peer = taking.accept()
            self.came.append(peer[0])
            connection.close()


def fetched(fetcher: Fetcher, url: str) -> str:
    """What becomes of a URL."""
    try:
        fetcher.fetch(url)
    except FetchError as error:
        return str(error)
    return "fetched"


def main() -> None:
    """Fetches the URLs that are the arguments, of hosts that are all allowed."""
    urls = sys.argv[1:]
    listener = Listener(80, 443, 8443)
    hosts = {url.split("/")[2].rpartition("@")[2] for url in urls}
    hosts |= {host.strip("[]") for host in hosts}
    fetcher = Fetcher(hosts, MAX_BYTES, SECONDS)
    said = {url: fetched(fetcher, url) for url in urls}
    num = len(listener.came)
    with mock.patch.object(fetching, "is_public", lambda address: True):
        for url in urls:
            fetched(fetcher, url)
    unchecked = len(listener.came) - num
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 443), SECONDS).recv(1)
    print(
        json.dumps({"said": said, "came": num, "unchecked": unchecked, "direct": len(listener.came) - num - unchecked})
    )


if __name__ == "__main__":
    main()
