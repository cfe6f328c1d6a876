"""What the commands share as clients: channels, errors as one line, a request as plain values. Small on purpose: the
SDK is where a client library belongs."""

from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluice.v1 import types_pb2

from services.cli.access import Access
from services.config import bad_setting

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    # Without these a reader that stops lets thousands of messages pile up in the transport.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65536),
    ("grpc.use_local_subchannel_pool", 1),
)


def channel(address: str, access: Access) -> grpc.Channel:
    """A blocking channel. Raises ServiceError for a file that cannot be read."""
    if not access.has_tls:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _credentials(access), options=CHANNEL_OPTIONS)


def aio_channel(address: str, access: Access) -> grpc.aio.Channel:
    """The same for asyncio."""
    if not access.has_tls:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _credentials(access), options=CHANNEL_OPTIONS)


def _credentials(access: Access) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_file("tls_ca", access.ca),
        private_key=_file("tls_key", access.key),
        certificate_chain=_file("tls_cert", access.certificate),
    )


def _file(setting: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise bad_setting(setting, f"cannot read {path}: {error.strerror}") from None


def describe(error: grpc.RpcError, address: str) -> str:
    """One line for a person: code, reason, message, what to do."""
    assert isinstance(error, grpc.Call)
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or "").lower():
        return f"no server answers at {address}; start one with `sluice serve`, or give --address"
    reason = ""
    for detail in _details(error):
        if isinstance(detail, error_details_pb2.ErrorInfo):
            reason = f" ({detail.reason})"
    return f"{code.name}{reason}: {error.details()}"


def _details(error: grpc.Call) -> list[object]:
    status = rpc_status.from_call(error)
    found: list[object] = []
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            found.append(info)
    return found


def seconds(duration: Duration) -> float:
    """A protobuf duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def usage_of(usage: types_pb2.Usage) -> dict[str, int]:
    """Usage as plain numbers."""
    return {field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields}


def timings_of(timings: types_pb2.Timings) -> dict[str, float]:
    """Timings as seconds, and the number of preemptions."""
    names = ("queue", "tokenize", "prefill", "decode", "detokenize", "ttft")
    found = {f"{name}_s": round(seconds(getattr(timings, name)), 6) for name in names}
    return {**found, "preemptions": timings.preemptions}


def finish_name(reason: "types_pb2.FinishReason.ValueType") -> str:
    """length, eos, stop_token or stop_string."""
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
