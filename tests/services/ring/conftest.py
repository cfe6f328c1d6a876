"""Ring sockets that are closed after each test."""

from collections.abc import Iterator

import pytest

from tests.services.ring.net import Net


@pytest.fixture
def net() -> Iterator[Net]:
    """Sockets of one test."""
    net = Net()
    yield net
    net.close()
