"""Shared by the client commands: the SDK's clients made from command-line options, and errors as one line."""

import contextlib
import errno
import sys
from collections.abc import Iterator

import grpc
import sluice
import typer
from google.protobuf.duration_pb2 import Duration
from sluice.settings import channel_options
from sluice.v1 import types_pb2

from sluice_server.services.cli.connection_options import ConnectionOptions
from sluice_server.services.config import bad_setting

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
INTERACTIVE = sluice.RetryPolicy(attempts=3)  # few attempts: a user waits for the error


def client(address: str, access: ConnectionOptions) -> sluice.Client:
    """Returns a blocking client. Raises ServiceError for a file that cannot be read."""
    with _readable(access):
        return sluice.Client(address, token=access.token, tls=_tls(access), retry=INTERACTIVE)


def aio_client(address: str, access: ConnectionOptions, channels: int, retry: sluice.RetryPolicy) -> sluice.AsyncClient:
    """Returns an asyncio client. Raises ServiceError for a file that cannot be read."""
    with _readable(access):
        return sluice.AsyncClient(address, token=access.token, tls=_tls(access), channels=channels, retry=retry)


def aio_channel(address: str, access: ConnectionOptions) -> grpc.aio.Channel:
    """Returns a bare channel, for a proxy that passes on its callers' credentials."""
    tls = _tls(access)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=channel_options(0))
    with _readable(access):
        return grpc.aio.secure_channel(address, tls.credentials(), options=channel_options(0))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MISTAKES = {  # parts of messages of gRPC, where a server answers that is another one than was meant
    "http1.x server": "speaks HTTP/1 and not gRPC; give the address of the server's --listen, not that of --http",
    "WRONG_VERSION_NUMBER": "does not speak TLS; leave out --tls, and the options of certificates",
    "CERTIFICATE_VERIFY_FAILED": "has a certificate that is not trusted here; --tls-ca names the authority to trust",
}


def _tls(access: ConnectionOptions) -> sluice.Tls | None:
    return sluice.Tls(access.ca, access.certificate, access.key) if access.has_tls else None


@contextlib.contextmanager
def _readable(access: ConnectionOptions) -> Iterator[None]:
    settings = {access.ca: "tls_ca", access.certificate: "tls_cert", access.key: "tls_key"}
    try:
        yield
    except OSError as error:
        setting = next((name for path, name in settings.items() if str(path) == error.filename), "tls_ca")
        raise bad_setting(setting, f"cannot read {error.filename}: {error.strerror}") from None


@contextlib.contextmanager
def told(address: str) -> Iterator[None]:
    """Ends the command as its call ends: an error is one line, Ctrl-C and a reader of the output that left say nothing.
    Output that cannot be written is one line too. Raises BadParameter for an option whose value the contract's field
    cannot hold."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except sluice.SluiceError as error:
        print(f"error: {describe(error, address)}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except BrokenPipeError as error:
        sys.stdout = None  # the interpreter must not flush at exit
        raise typer.Exit(EXIT_FAILED) from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        sys.stdout = None
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from error


def describe(error: sluice.SluiceError, address: str) -> str:
    """Returns an error as one line for users: code, reason, message and what to do."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        for part, said in _MISTAKES.items():
            if part in error.message:
                return f"{address} {said}"
    if error.code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in error.message.lower():
        return f"no server answers at {address}; start one with `sluice serve`, or give --address"
    if error.code is grpc.StatusCode.UNAVAILABLE and "errors resolving" in error.message:
        return f"--address: no host of the name in {address} is known"
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{error}; --api-key or SLUICE_API_KEY gives the key"
    return str(error)


def seconds(duration: Duration) -> float:
    """Returns a protobuf duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def usage_of(usage: types_pb2.Usage) -> dict[str, int | list[int]]:
    """Returns usage as plain numbers; repeated fields as lists."""
    values = [(field, getattr(usage, field.name)) for field in usage.DESCRIPTOR.fields]
    return {field.name: list(value) if field.is_repeated else value for field, value in values}


def timings_of(timings: types_pb2.Timings) -> dict[str, float]:
    """Returns timings in seconds, and the number of preemptions."""
    names = ("queue", "tokenize", "prefill", "decode", "detokenize", "ttft")
    found = {f"{name}_s": round(seconds(getattr(timings, name)), 6) for name in names}
    return {**found, "preemptions": timings.preemptions}
