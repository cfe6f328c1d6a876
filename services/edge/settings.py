"""The settings of the HTTP application, as frozen values. Reads no file, no environment variable and no argument."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class HttpSettings:
    """How the application meets its clients.

    Attributes:
        allowed_origins: web origins whose pages may call it, as https://host; "*" is every one.
        allowed_hosts: names of the Host header that it answers, besides localhost and addresses; "*.host" is every name
            below one, "*" every name.
        root_path: path below which a proxy serves it, as /prefix; the proxy may strip it or not.
        access_log: one log line for each request.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ("*",)
    root_path: str = ""
    access_log: bool = False
