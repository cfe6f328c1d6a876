"""Which revisions are compatible."""

import pytest

from sluice_server.services.checkpoint.revisions import agreed, fits, whole
from sluice_server.services.messages.processes import Role, Visit

T, E, D = Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER


@pytest.mark.parametrize(
    ("revision", "served", "expected"),
    [
        (whole("c1", "w1"), "c1", True),
        (whole("c1", "w1"), whole("c1", "w1"), True),
        (whole("c1", "w1"), whole("c1", "w2"), False),
        (whole("c1", "w1"), "c2", False),
        (whole("c11", "w1"), "c1", False),
        ("c1", whole("c1", "w1"), False),
        (whole("my-label+c1", "w1"), "my-label+c1", True),
        (whole("my-label+c1", "w1"), "c1", False),
    ],
)
def test_fits(revision: str, served: str, expected: bool) -> None:
    assert fits(revision, served) is expected


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([(T, "c1"), (E, "c1-w1"), (D, "c1")], "c1-w1"),
        ([(T, "commit"), (E, "commit"), (D, "commit")], "commit"),
        ([(T, "c2"), (E, "c1-w1"), (D, "c1")], None),
        ([(T, "c1"), (E, "c1-w1"), (D, "c2")], None),
        ([(T, "c1"), (E, "c1-w1"), (E, "c1-w2"), (D, "c1")], None),
        ([(T, "c1"), (D, "c1")], None),
    ],
)
def test_agreed(served: list[tuple[Role, str]], expected: str | None) -> None:
    assert agreed([Visit(role, str(at), 1, 1, revision=one) for at, (role, one) in enumerate(served)]) == expected
