"""Token ids in messages."""

import pytest

from sluice_server.services.messages.work import pack_ids, unpack_ids


def test_ids_travel_as_four_bytes_each() -> None:
    assert unpack_ids(pack_ids([0, 1, 151_935])) == [0, 1, 151_935]
    with pytest.raises(ValueError, match="bytes"):
        unpack_ids(b"12345")
