"""Token ids of requests: packed in slices, with the same result and the same errors as at once."""

import dataclasses
from collections.abc import Sequence

import pytest
from sluice.v1 import inference_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract.ids import SLICE_IDS, at_once, pack_checked, packing
from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.fake_ring import SETTINGS

NUM = 2 * SLICE_IDS + 3
IDS = [at % 50 for at in range(NUM)]
LISTS: dict[str, Sequence[int]] = {
    "list": IDS,
    "protobuf": inference_pb2.DetokenizeRequest(token_ids=IDS).token_ids,
}


@pytest.mark.parametrize("ids", LISTS.values(), ids=LISTS)
def test_ids_are_packed_in_slices(ids: Sequence[int]) -> None:
    slices = packing("token_ids", ids, SETTINGS)
    assert len(list(slices)) == 2
    assert pack_checked("token_ids", ids, SETTINGS) == pack_ids(IDS)
    assert pack_checked("token_ids", ids[:0], SETTINGS) == b""


def test_an_error_names_the_place_in_the_whole_list() -> None:
    wrong = [*IDS[:-1], SETTINGS.limits.vocab_size]
    with pytest.raises(ServiceError) as refused:
        pack_checked("token_ids", wrong, SETTINGS)
    assert refused.value.field == f"token_ids[{NUM - 1}]"


def test_too_many_ids_are_refused_before_the_first_is_read() -> None:
    settings = dataclasses.replace(SETTINGS, max_token_ids=NUM + 4)
    assert pack_checked("ids", IDS, settings, num_before=4)
    with pytest.raises(ServiceError, match=f"{NUM + 5} ids in all; at most {NUM + 4}"):
        next(packing("ids", IDS, settings, num_before=5))


def test_all_slices_are_done_at_once() -> None:
    slices = packing("token_ids", IDS, SETTINGS)
    next(slices)
    assert at_once(slices) == pack_ids(IDS)
