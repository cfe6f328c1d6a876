"""The number of tokens that a request may receive."""

from sluice_server.services.gateway.requests.credit import GrantedCredit


def test_credit_is_spent_when_as_many_tokens_came_as_are_allowed() -> None:
    credit = GrantedCredit(2)
    assert [credit.is_spent(num) for num in (1, 2, 3)] == [False, True, True]
    credit.grant(3)
    assert not credit.is_spent(4) and credit.unused(4) == 1


def test_credit_without_a_limit_stays_so() -> None:
    credit = GrantedCredit()
    credit.grant(5)
    assert credit.allowed is None and credit.unused(7) is None and not credit.is_spent(1 << 30)
