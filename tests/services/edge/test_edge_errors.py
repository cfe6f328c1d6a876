import grpc
import pytest

from sluice_server.engine.errors import ServiceError, invalid, queue_full, unsupported
from sluice_server.services.edge.errors import UNREACHABLE, from_rpc
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.gateway.contract.status import to_status

NONE = grpc.aio.Metadata()


def rpc_error(error: ServiceError) -> grpc.aio.AioRpcError:
    code, message, trailers = to_status(error)
    return grpc.aio.AioRpcError(code, NONE, grpc.aio.Metadata(*trailers), message)


@pytest.mark.parametrize("code", [one for one in grpc.StatusCode if one is not grpc.StatusCode.OK])
def test_every_status_has_an_answer_that_only_repeats_what_may_work_later(code: grpc.StatusCode) -> None:
    made = from_rpc(grpc.aio.AioRpcError(code, NONE, NONE, "text"))
    repeated = made.status >= 500 or made.status in (408, 409, 429)
    hopeless = {
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
        "NOT_FOUND",
        "OUT_OF_RANGE",
    }
    assert repeated is not (code.name in hopeless) or code.name in ("CANCELLED", "FAILED_PRECONDITION")
    assert 400 <= made.status < 600 and made.kind and made.message


def test_what_the_details_say_is_told() -> None:
    names = FieldNames({"sampling.top_p": "top_p"})
    bad = from_rpc(rpc_error(invalid("sampling.top_p", "2 is not in (0, 1]")), names)
    assert (bad.status, bad.param, bad.code) == (400, "top_p", "invalid_parameter")
    assert bad.message == "top_p: 2 is not in (0, 1]"
    unbuilt = from_rpc(rpc_error(unsupported("sampling.logit_bias")))
    assert (unbuilt.status, unbuilt.param, unbuilt.code) == (400, "sampling.logit_bias", "feature_unsupported")
    assert not from_rpc(rpc_error(unsupported("Embed"))).param  # a call, and no field
    full = from_rpc(rpc_error(queue_full(5, 5, 1.5)))
    assert (full.status, full.headers()) == (429, {"retry-after": "2"})


def test_addresses_of_ours_are_not_told() -> None:
    text = "failed to connect to all addresses; last error: ipv4:10.0.0.7:50051: Connection refused"
    assert from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, NONE, NONE, text)).message == UNREACHABLE
