"""Decides which image URLs may be fetched, and which addresses may be dialled for them. Pure.

A client could make a server send requests to addresses that only the server reaches (SSRF). So hosts are those that the
operator lists, over https, and every address that a name resolves to must be one of the public Internet.
"""

import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

PORT = 443
MAX_URL_BYTES = 2048
_HOST = re.compile(
    r"(?=.{1,253}(:\d|$))([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(:\d{1,5})?"
)
_PLAIN = re.compile(r"[!-~]+")  # ASCII without spaces and control characters
# Prefixes within which an IPv6 address stands for an IPv4 one, which a router of the server's own network may reach.
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")))


class ImageUrl(NamedTuple):
    """An address that may be fetched: name and port of its host, and what to ask it for."""

    host: str
    port: int
    path: str


def hosts_of(text: str) -> frozenset[str]:
    """Returns the hosts of a list "host,host:port,…". Raises ValueError for an entry that is none."""
    found = []
    for entry in filter(None, (part.strip().lower() for part in text.split(","))):
        if not _HOST.fullmatch(entry) or int(entry.partition(":")[2] or PORT) > 65535:
            raise ValueError(f"{entry[:80]!r} is no host: write names without https:// and without a path")
        found.append(entry)
    return frozenset(found)


def read_url(url: str, hosts: Collection[str]) -> ImageUrl:
    """Returns the parts of a URL. Raises ValueError saying why it is not fetched; the text follows the field's name."""
    if len(url) > MAX_URL_BYTES:
        raise ValueError(f"has {len(url)} characters; at most {MAX_URL_BYTES} are allowed")
    if not _PLAIN.fullmatch(url) or "\\" in url:
        raise ValueError("has a space, a backslash or a character that is not ASCII: percent-encode it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORT
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from None
    if parts.scheme != "https":
        raise ValueError(f"has the scheme {parts.scheme[:20]!r}; only https is fetched")
    if "@" in parts.netloc:
        raise ValueError("has a user or password, which is not sent: leave it out")
    if (host if port == PORT else f"{host}:{port}") not in hosts:
        shown = parts.netloc[:80]
        raise ValueError(f"has the host {shown!r}, which this server does not fetch from (--media-from): send the data")
    return ImageUrl(host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public Internet."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.scope_id is not None or any(found in network for network in _TRANSLATED):
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)
