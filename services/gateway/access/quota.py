"""Quotas of tenants: requests a minute, tokens a minute, concurrent requests. Pure; the clock is passed in.

A request is charged its reserved tokens (prompt plus max_tokens) when it opens, and settled by the used ones when it
ends. So a bucket can go below zero; the tenant then waits until it is refilled.
"""

import fnmatch
from collections.abc import Callable, Iterable

import msgspec

from sluice_server.engine.errors import Code, ServiceError

MINUTE_S = 60.0
RETRY_S = 1.0  # at max_concurrent: when a request will end is unknown


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one tenant; None means no limit.

    Attributes:
        trust_chat_content: content of its chats may write control tokens.
        adapters: names of the adapters that its requests may name; * stands for any characters.
        models: ids and aliases of the models that its requests may reach, in the same form.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    trust_chat_content: bool = False
    adapters: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1, or leave it out for no limit")

    def share(self, num: int) -> "TenantLimits":
        """Returns the limits of one of `num` equal gateways. All shares together stay within the limit, but each is at
        least 1."""

        def part(value: int | None) -> int | None:
            return None if value is None else max(1, value // num)

        return TenantLimits(part(self.requests_per_minute), part(self.tokens_per_minute), part(self.max_concurrent))


class Bucket:
    """A token bucket: full at first, refilled at a constant rate, never above one minute's worth."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Returns the seconds until `amount` can be taken; 0 means now. An amount above one minute's worth counts as
        that."""
        self._refill(now_s)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, amount: int, now_s: float) -> None:
        """Takes `amount`, even below zero; a negative `amount` is given back."""
        self._refill(now_s)
        self._level = min(float(self.per_minute), self._level - amount)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Changes the rate."""
        self._refill(now_s)
        self.per_minute = per_minute
        self._level = min(float(per_minute), self._level)

    def _refill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self._level = min(float(self.per_minute), self._level + passed_s * self.per_minute / MINUTE_S)


class _Account:
    """The usage of one tenant."""

    def __init__(self) -> None:
        self.limits = TenantLimits()
        self.num_open = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def limit(self, limits: TenantLimits, now_s: float) -> None:
        if limits == self.limits:
            return
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now_s)


class Quotas:
    """The usage of all tenants. `limits_of` is called for every request, so that changed limits apply at once."""

    def __init__(self, limits_of: Callable[[str], TenantLimits], num_gateways: int) -> None:
        """`num_gateways` share the limits; this gateway grants its share of them."""
        self._limits_of = limits_of
        self._num_gateways = num_gateways
        self._accounts: dict[str, _Account] = {}

    def take(self, tenant: str, num_tokens: int, now_s: float) -> int:
        """Opens a request; returns the tokens charged, for `settle`. Raises ServiceError QUOTA_EXCEEDED."""
        account = self._accounts.setdefault(tenant, _Account())
        whole = self._limits_of(tenant)
        account.limit(whole.share(self._num_gateways), now_s)
        try:
            charged = _check(account, num_tokens, now_s)
        except _UsedUp as used_up:
            raise _exceeded(tenant, used_up, whole, self._num_gateways) from None
        account.num_open += 1
        if account.requests is not None:
            account.requests.take(1, now_s)
        if account.tokens is not None:
            account.tokens.take(charged, now_s)
        return charged

    def trusts_chat_content(self, tenant: str) -> bool:
        """Whether content of the tenant's chats may write control tokens."""
        return self._limits_of(tenant).trust_chat_content

    def allows_adapter(self, tenant: str, name: str) -> bool:
        """Whether requests of the tenant may name an adapter."""
        patterns = self._limits_of(tenant).adapters
        return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def allows_model(self, tenant: str, names: Iterable[str]) -> bool:
        """Whether requests of the tenant may reach a model that has these names."""
        patterns = self._limits_of(tenant).models
        return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)

    def settle(self, tenant: str, charged: int, used: int, now_s: float) -> None:
        """Closes a request that used `used` tokens."""
        account = self._accounts[tenant]
        account.num_open -= 1
        if account.tokens is not None:
            account.tokens.take(used - charged, now_s)
        if not account.num_open and account.limits == TenantLimits():
            del self._accounts[tenant]


class _UsedUp(Exception):
    """A limit of an account is used up: which, this gateway's share, and seconds to wait."""

    def __init__(self, name: str, share: int, wait_s: float) -> None:
        super().__init__(name)
        self.name = name
        self.share = share
        self.wait_s = wait_s


def _check(account: _Account, num_tokens: int, now_s: float) -> int:
    limits = account.limits
    if limits.max_concurrent is not None and account.num_open >= limits.max_concurrent:
        raise _UsedUp("max_concurrent", limits.max_concurrent, RETRY_S)
    for name, bucket, amount in (
        ("requests_per_minute", account.requests, 1),
        ("tokens_per_minute", account.tokens, num_tokens),
    ):
        wait_s = bucket.wait_s(amount, now_s) if bucket is not None else 0.0
        if bucket is not None and wait_s > 0:
            raise _UsedUp(name, bucket.per_minute, wait_s)
    return min(num_tokens, account.tokens.per_minute) if account.tokens is not None else 0


def _exceeded(tenant: str, used_up: _UsedUp, whole: TenantLimits, num_gateways: int) -> ServiceError:
    name, share, wait_s = used_up.name, used_up.share, used_up.wait_s
    limit = getattr(whole, name)
    here, details = "", {"quota": name, "limit": str(limit), "tenant": tenant}
    if num_gateways > 1:
        here = f" at this gateway, one of {num_gateways} with a share of {share} each"
        details["share"] = str(share)
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        f"the quota {name} of {limit} of tenant {tenant!r} is used up{here}: try again in {wait_s:.1f} s",
        details=details,
        retry_after_s=wait_s,
    )


def _resized(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.resize(per_minute, now_s)
    return bucket
