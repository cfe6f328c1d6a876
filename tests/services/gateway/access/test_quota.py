import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.access.quota import Bucket, Quotas, TenantLimits
from sluice_server.services.gateway.contract.status import to_rpc


def quotas(**limits: int) -> Quotas:
    return Quotas(lambda tenant: msgspec.convert(limits, TenantLimits) if tenant == "a" else TenantLimits(), 1)


def refusal(of: Quotas, num_tokens: int, now_s: float) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        of.take("a", num_tokens, now_s)
    return caught.value


def test_requests_a_minute_come_back_one_by_one() -> None:
    some = quotas(requests_per_minute=2)
    for _ in range(2):
        some.settle("a", some.take("a", 0, 0.0), 0, 0.0)
    error = refusal(some, 0, 0.0)
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert error.retry_after_s == pytest.approx(30.0)
    assert some.take("b", 0, 0.0) == 0
    refusal(some, 0, 29.9)
    some.take("a", 0, 30.0)


def test_tokens_are_charged_as_reserved_and_settled_as_used() -> None:
    some = quotas(tokens_per_minute=600)
    charged = some.take("a", 500, 0.0)
    assert refusal(some, 200, 0.0).retry_after_s == pytest.approx(10.0)
    some.settle("a", charged, 100, 0.0)
    assert some.take("a", 500, 0.0) == 500


def test_more_than_a_minutes_worth_is_let_in_when_full_and_paid_for_afterwards() -> None:
    some = quotas(tokens_per_minute=60)
    charged = some.take("a", 10_000, 0.0)
    assert charged == 60
    some.settle("a", charged, 180, 0.0)
    assert refusal(some, 1, 0.0).retry_after_s == pytest.approx(121.0)
    refusal(some, 60, 179.0)
    some.take("a", 60, 180.0)


def test_places_are_given_back() -> None:
    some = quotas(max_concurrent=1)
    charged = some.take("a", 5, 0.0)
    assert refusal(some, 5, 0.0).details["quota"] == "max_concurrent"
    some.settle("a", charged, 5, 0.0)
    some.take("a", 5, 0.0)


def test_changed_limits_hold_at_once_and_refill_nothing() -> None:
    limits = [TenantLimits(requests_per_minute=1)]
    some = Quotas(lambda tenant: limits[0], 1)
    some.take("a", 0, 0.0)
    limits[0] = TenantLimits(requests_per_minute=60)
    assert refusal(some, 0, 0.0).retry_after_s == pytest.approx(1.0)
    limits[0] = TenantLimits()
    some.take("a", 0, 0.0)


def test_gateways_share_a_limit() -> None:
    limits = TenantLimits(requests_per_minute=10, max_concurrent=2)
    assert limits.share(4) == TenantLimits(requests_per_minute=2, max_concurrent=1)
    with pytest.raises(ValueError, match="at least 1"):
        TenantLimits(max_concurrent=0)


def test_what_is_used_up_is_told_as_the_tenants_quota_and_the_share_of_one_gateway_beside_it() -> None:
    alone, one_of_two = (Quotas(lambda tenant: TenantLimits(requests_per_minute=4), num) for num in (1, 2))
    for some, num in ((alone, 4), (one_of_two, 2)):
        for _ in range(num):
            some.settle("a", some.take("a", 0, 0.0), 0, 0.0)
    error = refusal(alone, 0, 0.0)
    assert error.message == "the quota requests_per_minute of 4 of tenant 'a' is used up: try again in 15.0 s"
    assert error.details == {"quota": "requests_per_minute", "limit": "4", "tenant": "a"}
    shared = refusal(one_of_two, 0, 0.0)
    assert "requests_per_minute of 4 of tenant 'a' is used up at this gateway, one of 2" in shared.message
    assert "with a share of 2 each" in shared.message
    assert shared.details == {"quota": "requests_per_minute", "limit": "4", "tenant": "a", "share": "2"}


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60))
def test_a_bucket_never_gives_more_than_its_rate_and_one_minutes_worth(takes: list[tuple[float, int]]) -> None:
    bucket, now_s, given_out = Bucket(60, 0.0), 0.0, 0
    for passed_s, amount in takes:
        now_s += passed_s
        if bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            given_out += amount
        assert given_out <= 60 + now_s + 1e-6


def test_the_status_names_the_tenant_and_when_to_come_back() -> None:
    some = quotas(max_concurrent=1)
    some.take("a", 0, 0.0)
    status = to_rpc(refusal(some, 0, 0.0))
    assert [one.type_url.rpartition(".")[2] for one in status.details] == ["ErrorInfo", "RetryInfo", "QuotaFailure"]
