"""`sluice generate`: one prompt over real gRPC, streamed to the terminal or printed as one JSON object."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from services.cli.access import Access, TlsCaOption, TlsCertOption, TlsKeyOption, TlsOption, TokenOption

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def generate(  # noqa: PLR0913 # a command line lists its options
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    address: Annotated[str, typer.Option(envvar="SLUICE_ADDRESS", help="host:port of the server")] = "127.0.0.1:50051",
    model: Annotated[
        str | None, typer.Option(envvar="SLUICE_GENERATE_MODEL", help="model name; default: the server's")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(envvar="SLUICE_MAX_TOKENS", help="tokens at most")] = None,
    min_tokens: Annotated[int | None, typer.Option(envvar="SLUICE_MIN_TOKENS", help="tokens at least")] = None,
    temperature: Annotated[float | None, typer.Option(envvar="SLUICE_TEMPERATURE", help="0 is greedy")] = None,
    top_k: Annotated[int | None, typer.Option(envvar="SLUICE_TOP_K", help="keep the k most likely")] = None,
    top_p: Annotated[float | None, typer.Option(envvar="SLUICE_TOP_P", help="keep the likeliest mass p")] = None,
    min_p: Annotated[float | None, typer.Option(envvar="SLUICE_MIN_P", help="drop below min_p of the best")] = None,
    seed: Annotated[int | None, typer.Option(envvar="SLUICE_SEED", help="seed of the sampling noise")] = None,
    stop: Annotated[list[str] | None, typer.Option(envvar="SLUICE_STOP", help="stop string; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option(envvar="SLUICE_IGNORE_EOS", help="go on after end-of-sequence")] = False,
    chat: Annotated[bool, typer.Option(envvar="SLUICE_CHAT", help="send the prompt as a user's chat message")] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="SLUICE_JSON", help="print one JSON object")] = False,
    timeout: Annotated[float | None, typer.Option(envvar="SLUICE_TIMEOUT", help="deadline in seconds")] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Stream a completion of PROMPT."""
    # grpc is imported here, so that `sluice serve` and `--help` start without it.
    import grpc
    from sluice.v1 import inference_pb2_grpc, types_pb2

    from services.cli.client import channel, describe

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    spec = types_pb2.GenerationSpec(model=model)
    try:
        spec.sampling.MergeFrom(types_pb2.SamplingParams(**{k: v for k, v in sampling.items() if v is not None}))  # type: ignore[arg-type] # mixed
    except ValueError as error:
        raise typer.BadParameter(f"an option is outside what its field can carry: {error}") from error
    spec.stop.MergeFrom(types_pb2.StopConditions(strings=stop or [], ignore_eos=ignore_eos or None))
    if chat:
        spec.chat.messages.add(role=types_pb2.ROLE_USER).parts.add(text=text)
    else:
        spec.text = text
    access = Access.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with channel(address, access) as opened:
        try:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            _show(stub, spec, Call(timeout, access.metadata), as_json)
        except grpc.RpcError as error:
            print(f"error: {describe(error, address)}", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            sys.stdout = None  # nobody reads: the interpreter must not flush at exit
            raise typer.Exit(EXIT_FAILED) from error


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What goes with the request: its deadline, its credentials."""

    timeout_s: float | None
    metadata: tuple[tuple[str, str], ...]


def _show(stub: object, spec: object, call: Call, as_json: bool) -> None:
    """Stream to stdout; with `as_json` collect and print one object."""
    from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

    from services.cli.client import finish_name, timings_of, usage_of

    assert isinstance(stub, inference_pb2_grpc.InferenceServiceStub)
    assert isinstance(spec, types_pb2.GenerationSpec)
    request = inference_pb2.StreamGenerateRequest(spec=spec)
    events: Iterator[inference_pb2.StreamGenerateResponse] = stub.StreamGenerate(
        request, timeout=call.timeout_s, metadata=call.metadata
    )
    result: dict[str, object] = {}
    text: list[str] = []
    ids: list[int] = []
    for event in events:
        match event.WhichOneof("event"):
            case "delta":
                text.append(event.delta.text)
                ids.extend(token.id for token in event.delta.tokens)
                if not as_json:
                    sys.stdout.write(event.delta.text)
                    sys.stdout.flush()
            case "output_finished":
                result["finish_reason"] = finish_name(event.output_finished.finish_reason)
            case "finished":
                result["usage"] = usage_of(event.finished.usage)
                result["timings"] = timings_of(event.finished.timings)
    if as_json:
        print(json.dumps({"text": "".join(text), "token_ids": ids, **result}, ensure_ascii=False))
    else:
        sys.stdout.write("\n")
