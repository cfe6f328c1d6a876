"""The blocking client: `generate`, `stream`, `converse`, and the calls that answer once."""

import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from sluice.adapters import MAX_PAGE, LoadAdapterOptions, load_request, unload_request
from sluice.attempts import Attempts
from sluice.completion import Completion
from sluice.embeddings import Embeddings, EmbedOptions, Input, embed_request
from sluice.errors import from_rpc
from sluice.models import LoadModelOptions, alias_request
from sluice.models import load_request as load_model_request
from sluice.models import sleep_request as sleep_model_request
from sluice.models import unload_request as unload_model_request
from sluice.pool import Pool
from sluice.profiles import ProfileOptions, profile_request
from sluice.progress import Progress
from sluice.ranking import (
    Classifications,
    ClassifyOptions,
    Pair,
    Ranking,
    RerankOptions,
    ScoreOptions,
    Scores,
    classify_request,
    rerank_request,
    score_request,
)
from sluice.retry import RetryPolicy
from sluice.session import Session
from sluice.settings import Settings, Tls, channel_options, targets_of
from sluice.spec import GenerateOptions, Prompt, build
from sluice.stream import Line, Stream, cancel_generation, once
from sluice.tokens import TokenSpan, spans, tokenize_request
from sluice.v1 import control_pb2, inference_pb2, types_pb2
from sluice.watching import LoadWatch

_Request = TypeVar("_Request")
_T = TypeVar("_T")


class Client:
    """A client of one or several servers. Thread-safe. Every method raises SluiceError.

    Args:
        target: host:port, or several: of one service, or of several with the same model (see `sluice.balance`).
        token: key to authenticate with.
        tls: None is plaintext; Tls() trusts the host's authorities.
        timeout_s: timeout of calls without one of their own.
        channels: the most connections.
        retry: when failed calls are repeated; `sluice.NEVER` repeats and resumes nothing.
    """

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float | None = None,
        channels: int = 4,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._settings = Settings(targets_of(target), tls, token, channels, timeout_s, retry or RetryPolicy())
        credentials = tls.credentials() if tls is not None else None
        num_targets = len(self._settings.targets)

        def open_line(address: str, number: int) -> Line:
            options = channel_options(number, num_targets, address)
            if credentials is None:
                return Line(grpc.insecure_channel(address, options))
            return Line(grpc.secure_channel(address, credentials, options))

        self._pool = Pool(open_line, self._settings.targets, channels, self._watch)
        self._watching: LoadWatch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and cancels running calls."""
        if self._watching is not None:
            self._watching.close()
        for line in self._pool.lines():
            line.channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Returns the whole answer at once. A call whose server is lost is repeated from the beginning."""
        request = inference_pb2.GenerateRequest(spec=build(prompt, options))
        found = self._unary(lambda line: line.inference.Generate, request, timeout_s)
        return Completion(found)

    def stream(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Returns the answer as a stream: iterate over its deltas. It is resumed when its connection is lost."""
        progress = Progress(build(prompt, options))
        return Stream(self._pool, progress, self._attempts(timeout_s, progress), self._settings.metadata())

    def converse(self) -> Session:
        """Opens a session of many generations, each with its own credit: `with client.converse() as session`."""
        return Session(self._pool, self._attempts, self._settings.metadata())

    def cancel(self, generation_id: str) -> None:
        """Cancels a generation by its id; does nothing if it has ended."""
        cancel_generation(self._pool, generation_id, self._settings.metadata())

    def tokenize(self, prompt: str | types_pb2.Chat, *, timeout_s: float | None = None) -> list[int]:
        """Returns the token ids of a prompt."""
        request = tokenize_request(prompt)
        found = self._unary(lambda line: line.inference.Tokenize, request, timeout_s)
        return [token.id for token in found.tokens]

    def count_tokens(self, prompt: str | types_pb2.Chat, *, timeout_s: float | None = None) -> int:
        """Returns the number of a prompt's tokens."""
        request = tokenize_request(prompt, count_only=True)
        found = self._unary(lambda line: line.inference.Tokenize, request, timeout_s)
        return found.num_tokens

    def token_spans(self, prompt: str | types_pb2.Chat, *, timeout_s: float | None = None) -> list[TokenSpan]:
        """Returns the tokens of a prompt with the place of each in its text; of a chat, in what its template makes."""
        request = tokenize_request(prompt, offsets=True)
        found = self._unary(lambda line: line.inference.Tokenize, request, timeout_s)
        return spans(found)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Returns the text of token ids."""
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids)
        return self._unary(lambda line: line.inference.Detokenize, request, timeout_s).text

    def embed(
        self, inputs: Input | Sequence[Input], *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Returns a vector for each input, in order; `inputs` are texts or lists of token ids, or one of them."""
        request = embed_request(inputs, options)
        found = self._unary(lambda line: line.inference.Embed, request, timeout_s)
        return Embeddings(found)

    def classify(
        self, inputs: Input | Sequence[Input], *, timeout_s: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Classifications:
        """Returns the scores of all classes for each input, in order; `inputs` as in `embed`."""
        request = classify_request(inputs, options)
        found = self._unary(lambda line: line.inference.Classify, request, timeout_s)
        return Classifications(found)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Returns the documents that answer the query best, the best first; `top_n` of them, or all."""
        request = rerank_request(query, documents, options)
        found = self._unary(lambda line: line.inference.Rerank, request, timeout_s)
        return Ranking(found)

    def score(
        self, pairs: Sequence[Pair], *, timeout_s: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Scores:
        """Returns how well the two texts of each pair go together, in order."""
        request = score_request(pairs, options)
        found = self._unary(lambda line: line.inference.Score, request, timeout_s)
        return Scores(found)

    def models(self, *, timeout_s: float | None = None) -> list[control_pb2.Model]:
        """Returns the models that the server has."""
        request = control_pb2.ListModelsRequest()
        found = self._unary(lambda line: line.control.ListModels, request, timeout_s)
        return list(found.models)

    def load_model(
        self, model: str, *, timeout_s: float | None = None, **options: Unpack[LoadModelOptions]
    ) -> control_pb2.Model:
        """Loads a model beside those that are served, and waits until it serves."""
        request = load_model_request(model, options)
        found = self._unary(lambda line: line.control.LoadModel, request, timeout_s)
        return found.model

    def unload_model(self, model: str, *, grace_s: float | None = None, timeout_s: float | None = None) -> None:
        """Unloads a model. Its generations may continue for `grace_s` seconds, or until they end."""
        request = unload_model_request(model, grace_s)
        self._unary(lambda line: line.control.UnloadModel, request, timeout_s)

    def sleep_model(
        self, model: str, *, grace_s: float | None = None, level: int | None = None, timeout_s: float | None = None
    ) -> None:
        """Stops a model's processes until it is asked for; at level 1 they only empty their cache. Its generations may
        continue for `grace_s` seconds."""
        self._unary(lambda line: line.control.SleepModel, sleep_model_request(model, grace_s, level), timeout_s)

    def wake_model(self, model: str, *, timeout_s: float | None = None) -> control_pb2.Model:
        """Wakes a model that sleeps, and waits until it serves."""
        request = control_pb2.WakeModelRequest(model=model)
        found = self._unary(lambda line: line.control.WakeModel, request, timeout_s)
        return found.model

    def set_alias(self, alias: str, weights: Mapping[str, int], *, timeout_s: float | None = None) -> None:
        """Makes a name stand for these models, by weight; without any, it is forgotten."""
        self._unary(lambda line: line.control.SetAlias, alias_request(alias, weights), timeout_s)

    def load_adapter(
        self,
        name: str,
        path: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[LoadAdapterOptions],
    ) -> control_pb2.Adapter:
        """Loads an adapter from the server's folder of adapters, and names it. `path`: default: as its name."""
        request = load_request(name, path, options)
        found = self._unary(lambda line: line.control.LoadAdapter, request, timeout_s)
        return found.adapter

    def unload_adapter(self, name: str, *, grace_s: float | None = None, timeout_s: float | None = None) -> None:
        """Takes an adapter's name away. Its generations may continue for `grace_s` seconds, or until they end."""
        request = unload_request(name, grace_s)
        self._unary(lambda line: line.control.UnloadAdapter, request, timeout_s)

    def adapters(self, *, timeout_s: float | None = None) -> list[control_pb2.Adapter]:
        """Returns the adapters that are loaded, by name."""
        found: list[control_pb2.Adapter] = []
        token = ""
        while True:
            request = control_pb2.ListAdaptersRequest(page_size=MAX_PAGE, page_token=token)
            page = self._unary(lambda line: line.control.ListAdapters, request, timeout_s)
            found += page.adapters
            token = page.next_page_token
            if not token:
                return found

    def server_info(self, *, timeout_s: float | None = None) -> control_pb2.GetServerInfoResponse:
        """Returns version, features and limits of the server."""
        request = control_pb2.GetServerInfoRequest()
        return self._unary(lambda line: line.control.GetServerInfo, request, timeout_s)

    def watch_load(self, interval_s: float = 1.0) -> Generator[control_pb2.Load, None, None]:
        """Yields the load of a gateway every `interval_s` seconds until the loop is left."""
        request = control_pb2.WatchLoadRequest()
        request.interval.FromNanoseconds(int(interval_s * 1e9))
        lease = self._pool.lease()
        call = lease.line.control.WatchLoad(request, metadata=self._settings.metadata())
        try:
            for answer in call:
                yield answer.load
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()
            self._pool.release(lease)

    def profile(
        self, kind: str, *, process: str = "", **options: Unpack[ProfileOptions]
    ) -> Generator[control_pb2.ProfileResponse, None, None]:
        """Yields the parts of a profile of one process of the server, until the loop is left.

        Args:
            kind: torch, stacks, python-memory or cuda-memory.
            process: its id; "" is the first engine.
        """
        request = profile_request(kind, process, options)
        lease = self._pool.lease()
        call = lease.line.control.Profile(request, metadata=self._settings.metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()
            self._pool.release(lease)

    def resize_cache(
        self, tokens: int | None = None, host_bytes: int | None = None, *, process: str = ""
    ) -> Generator[control_pb2.ResizeCacheResponse, None, None]:
        """Resizes the cache of an engine, and yields how far that is; a size that is None stays. It goes on if the
        loop is left. `process`: the engine's id; "" is the first one."""
        request = control_pb2.ResizeCacheRequest(process=process, tokens=tokens, host_bytes=host_bytes)
        lease = self._pool.lease()
        call = lease.line.control.ResizeCache(request, metadata=self._settings.metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()
            self._pool.release(lease)

    def clear_cache(
        self, tenant: str | None, *, process: str = ""
    ) -> Generator[control_pb2.ClearCacheResponse, None, None]:
        """Deletes what engines have cached of a tenant's requests, or of all for None, and yields how far that is. It
        goes on if the loop is left. `process`: an engine's id; "" is every one."""
        owner = {"everyone": True} if tenant is None else {"tenant": tenant}
        request = control_pb2.ClearCacheRequest(process=process, **owner)
        lease = self._pool.lease()
        call = lease.line.control.ClearCache(request, metadata=self._settings.metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()
            self._pool.release(lease)

    def _unary(
        self,
        method: "Callable[[Line], grpc.UnaryUnaryMultiCallable[_Request, _T]]",
        request: _Request,
        timeout_s: float | None,
    ) -> _T:
        metadata = self._settings.metadata()
        return once(
            self._pool,
            self._attempts(timeout_s, None),
            lambda line, left: method(line)(request, timeout=left, metadata=metadata),
        )

    def _watch(self) -> None:
        if self._pool.num_targets > 1:
            self._watching = LoadWatch(self._pool, self._settings.metadata())
            weakref.finalize(self, self._watching.close)  # for a program that does not close its client

    def _attempts(self, timeout_s: float | None, progress: Progress | None) -> Attempts:
        own = self._settings.timeout_s if timeout_s is None else timeout_s
        return Attempts(self._settings.retry, own, time.monotonic(), progress)
