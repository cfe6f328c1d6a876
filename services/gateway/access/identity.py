"""Authenticates callers: tenants, their keys and certificates, as one file lists them. No other data of a client
counts.

The file is TOML. Keys are 256 random bits, so their SHA-256 is stored and no slow hash is needed:

    [tenants.acme]               # limits; an absent one means no limit
    requests_per_minute = 600
    tokens_per_minute = 200_000  # prompt and output
    max_concurrent = 16
    trust_chat_content = true    # content of its chats may write control tokens

    [[keys]]                     # as `sluice token new` prints it
    sha256 = "9f86d0…"           # 64 hex digits
    tenant = "acme"
    scopes = ["generate"]        # generate, control, admin

    [[certificates]]             # of mTLS: a subject alternative name, or the common name
    name = "batch.acme.example"
    tenant = "acme"
    scopes = ["generate", "control"]

Pure except for `read_access`, which reads the file, and `new_key`, which draws random bits.
"""

import contextvars
import dataclasses
import enum
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.config import bad_setting
from sluice_server.services.gateway.access.quota import TenantLimits

KEY_PREFIX = "sluice_"
DIGEST_PREFIX = "sha256:"
MAX_KEY_BYTES = 256
SHELF_BYTES = 4  # prefix of a digest: selects a short list, whose digests are compared in constant time


class Scope(enum.StrEnum):
    """What an identity may do."""

    GENERATE = "generate"
    CONTROL = "control"
    ADMIN = "admin"


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller. The tenant salts the prefix cache and owns generations."""

    tenant: str
    scopes: frozenset[Scope]


LOCAL = Identity("default", frozenset(Scope))  # every caller, where there is no access file
CALLER: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller")  # set once per call, by the guard


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    tenant: str
    scopes: list[Scope]


class _Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    tenant: str
    scopes: list[Scope]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, TenantLimits] = {}
    keys: list[_Key] = []
    certificates: list[_Certificate] = []


class AccessPolicy:
    """The contents of an access file."""

    def __init__(self, file: _File) -> None:
        self._limits = file.tenants
        self._names = {one.name: Identity(one.tenant, frozenset(one.scopes)) for one in file.certificates}
        self._shelves: dict[bytes, list[tuple[bytes, Identity]]] = {}
        for one in file.keys:
            digest = bytes.fromhex(one.sha256)
            entry = (digest, Identity(one.tenant, frozenset(one.scopes)))
            self._shelves.setdefault(digest[:SHELF_BYTES], []).append(entry)

    def by_key(self, key: str) -> Identity | None:
        """Returns the identity of a key, or None; digests are compared in constant time."""
        if len(key) > MAX_KEY_BYTES:
            return None
        digest = digest_of(key)
        found = None
        for known, identity in self._shelves.get(digest[:SHELF_BYTES], ()):
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    def by_names(self, names: Iterable[str]) -> Identity | None:
        """Returns the identity of a certificate with these names: that of the first known name, or None."""
        return next((self._names[name] for name in names if name in self._names), None)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Returns the tenant's limits; no limits where the file has none."""
        return self._limits.get(tenant) or TenantLimits()


def read_access(path: Path) -> AccessPolicy:
    """Reads an access file. Raises ServiceError naming the file and the place, but no value: the file holds secrets."""
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise bad_setting("access_file", f"cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise bad_setting("access_file", f"{path}: {error}") from None
    except RecursionError:
        raise bad_setting(
            "access_file", f"{path} nests its values too deeply; no setting needs more than two"
        ) from None
    except (msgspec.DecodeError, ValueError):  # ValueError: invalid UTF-8, or a number of 4,300 digits
        raise bad_setting("access_file", f"{path} is not TOML") from None
    for at, key in enumerate(file.keys):
        if not _is_digest(key.sha256):
            raise bad_setting("access_file", f"{path}: keys[{at}].sha256 is not 64 hex digits")
    entries: list[_Key | _Certificate] = [*file.keys, *file.certificates]
    if any(not entry.tenant or not entry.scopes for entry in entries):
        raise bad_setting("access_file", f"{path}: a key or certificate has an empty tenant or no scope")
    return AccessPolicy(file)


def access_of(keys: Iterable[str]) -> AccessPolicy:
    """Returns the policy of `--api-key`: every key is the one tenant's, without limits, for everything but scope admin.
    Raises ServiceError for a digest that is none."""
    digests = [one.removeprefix(DIGEST_PREFIX) for one in map(as_digest, keys)]
    if not all(map(_is_digest, digests)):
        raise bad_setting("api_key", f"what follows {DIGEST_PREFIX} is not 64 hex digits")
    return AccessPolicy(_File(keys=[_Key(one, LOCAL.tenant, [Scope.GENERATE, Scope.CONTROL]) for one in digests]))


def as_digest(key: str) -> str:
    """Returns the form of a key that `--api-key` takes in its place and that only checks a key: its digest."""
    return key if key.startswith(DIGEST_PREFIX) else DIGEST_PREFIX + digest_of(key).hex()


def new_key() -> str:
    """Returns a new key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 of a key, which is stored in its place."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def unauthenticated(message: str) -> ServiceError:
    """CREDENTIALS_INVALID: the credentials are missing or unknown."""
    return ServiceError(Code.UNAUTHENTICATED, "CREDENTIALS_INVALID", message)


def not_allowed(method: str, wanted: Iterable[Scope]) -> ServiceError:
    """NOT_ALLOWED: the identity is known but has none of the scopes `wanted`."""
    scopes = " or ".join(sorted(wanted))
    return ServiceError(
        Code.PERMISSION_DENIED,
        "NOT_ALLOWED",
        f"{method} needs the scope {scopes}, which these credentials do not have",
        details={"scope": scopes},
    )


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(one in "0123456789abcdefABCDEF" for one in text)
