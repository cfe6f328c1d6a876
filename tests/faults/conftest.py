"""What the tests of ranks share: the answers of a service of one rank, which every group must give too."""

import pytest

from benchmarks.streams import Received, stream_all, varied
from tests.faults.hosts import OPTIONS
from tests.system.service import serve


@pytest.fixture(scope="session")
def one_rank() -> list[Received]:
    """The answers of a service of one rank."""
    with serve(*OPTIONS) as service:
        return stream_all(service.address, varied(16, 48))
