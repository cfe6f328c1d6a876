"""Defines `LLM`, the class for offline inference. Combines options, prompts, pipeline and outputs."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.classification import classification, ranking, scoring
from sluice_server.services.gateway.contract.embedding import embedding
from sluice_server.services.gateway.contract.ids import at_once
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.details import Detokenized, Tokenized
from sluice_server.services.messages.work import pack_ids, unpack_ids
from sluice_server.services.offline import batch
from sluice_server.services.offline.classes import (
    ClassificationOutput,
    RankedOutput,
    classification_outputs,
    classify_requests,
    ranked,
    rerank_requests,
    score_outputs,
    score_requests,
)
from sluice_server.services.offline.errors import PromptError
from sluice_server.services.offline.interrupts import held
from sluice_server.services.offline.loading import load
from sluice_server.services.offline.options import settings_of
from sluice_server.services.offline.outputs import RequestOutput, output_of, prompt_ids
from sluice_server.services.offline.params import Given
from sluice_server.services.offline.pipeline import Pipeline, closed
from sluice_server.services.offline.prompts import (
    Adapter,
    Conversation,
    Prompt,
    Specs,
    chat_options,
    chats_of,
    conversations_of,
    each_with,
    prompts_of,
    specs_of,
    with_adapters,
)
from sluice_server.services.offline.vectors import (
    EmbeddingOptions,
    EmbeddingOutput,
    embedding_outputs,
    of_prompt,
    requests_of,
)

_Asked = TypeVar("_Asked")


class LLM:
    """A model in this process, for use by one thread at a time. A context manager; `close` releases everything."""

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:  # noqa: ANN401 # their fields' types
        """Loads a model. `model` and `options` are those of `sluice serve`; see `services.offline.options`.

        Raises TypeError for an unknown option, ServiceError for a value or a checkpoint that cannot be used.
        """
        loaded = load(settings_of({"model": model, **options}))
        self._closing = loaded.closing
        self._pipeline: Pipeline | None = Pipeline(loaded)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Given | Sequence[Given] = None,
        *,
        adapter: Adapter = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generates outputs for each prompt, in order; `params` and `adapter` are for all prompts, or one for each.

        An adapter is the name of a folder in `adapter_dir`, which is read when it is first named. Raises PromptError
        for an invalid prompt, parameters or adapter, before anything is computed. On SIGINT everything is released.
        """
        found = prompts_of(prompts)
        return self._run(with_adapters(specs_of(found, each_with(params, len(found))), adapter), progress)

    def chat(  # noqa: PLR0913 # all that a chat template is given
        self,
        messages: Conversation | Sequence[Conversation],
        params: Given | Sequence[Given] = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        adapter: Adapter = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generates outputs for each conversation, which the checkpoint's chat template renders, or `chat_template`;
        otherwise as `generate`.

        Messages, tools and tool choice are in OpenAI's form; `documents` are for templates that have a place for them.
        With `continue_final_message` outputs continue the last message, an assistant's.
        """
        found = conversations_of(messages)
        options = {
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        specs = chats_of(found, each_with(params, len(found)), chat_options(options))
        return self._run(with_adapters(specs, adapter), progress)

    def stream(self, prompt: Prompt, params: Given = None, *, adapter: str | None = None) -> Iterator[str]:
        """Yields the text of one output as it becomes certain; closing the iterator cancels the request.

        Computes only while the caller waits for the next piece.
        """
        pipeline = self._open()
        (asked,) = _asked(with_adapters(specs_of([prompt], [params]), adapter), pipeline.settings)
        yield from batch.stream(pipeline, asked)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        **options: Any,  # noqa: ANN401 # the fields' types
    ) -> list[EmbeddingOutput]:
        """Returns a vector for each prompt, in order; `options` are the fields of `EmbeddingOptions`.

        Raises PromptError for an invalid prompt or option, before anything is computed.
        """
        pipeline = self._open()
        requests = requests_of(prompts_of(prompts), EmbeddingOptions(**options), pipeline.settings.max_embed_inputs)
        return [one for found in _each(pipeline, requests, embedding) for one in embedding_outputs(found)]

    def classify(self, prompts: Prompt | Sequence[Prompt], *, truncate: str = "none") -> list[ClassificationOutput]:
        """Returns the scores of all classes for each prompt, in order. Raises as `embed`."""
        pipeline = self._open()
        requests = classify_requests(prompts_of(prompts), truncate, pipeline.settings.max_embed_inputs)
        ended = _each(pipeline, requests, classification)
        return [one for found in ended for one in classification_outputs(found, pipeline.settings.model.labels)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: str = "none",
    ) -> list[RankedOutput]:
        """Returns the documents that answer the query best, the best first. `truncate` as in `embed`: what a pair loses
        that is too long, of its longer text first. Raises as `embed`."""
        pipeline = self._open()
        requests = rerank_requests(query, documents, top_n, instruction, truncate, pipeline.settings.max_embed_inputs)
        ended = _each(pipeline, requests, ranking)
        return ranked([one for found in ended for one in score_outputs(found, pipeline.settings.model.labels)], top_n)

    def score(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None, truncate: str = "none"
    ) -> list[float]:
        """Returns how well the two texts of each pair go together, in order. `truncate` as in `rerank`. Raises as
        `embed`."""
        pipeline = self._open()
        requests = score_requests(pairs, instruction, truncate, pipeline.settings.max_embed_inputs)
        ended = _each(pipeline, requests, scoring)
        return [one for found in ended for one in score_outputs(found, pipeline.settings.model.labels)]

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. Raises ServiceError."""
        pipeline = self._open()
        request = inference_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        found = batch.answer(pipeline, translate.tokenization(request, pipeline.settings))
        assert isinstance(found, Tokenized)
        return unpack_ids(found.ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Raises ServiceError."""
        pipeline = self._open()
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        found = batch.answer(pipeline, at_once(translate.detokenization(request, pipeline.settings)))
        assert isinstance(found, Detokenized)
        return found.text

    def close(self) -> None:
        """Ends threads and processes, and releases weights and cache. Idempotent."""
        if self._pipeline is None:
            return
        with held():
            self._pipeline.shut()
            self._pipeline = None
            self._closing.close()

    def _open(self) -> Pipeline:
        if self._pipeline is None:
            raise closed()
        return self._pipeline

    def _run(self, specs: Specs, progress: bool) -> list[RequestOutput]:
        pipeline = self._open()
        asked = _asked(specs, pipeline.settings)
        with _progress(len(specs), is_on=progress) as advance:
            ended = batch.run(pipeline, asked, advance)
        return [output_of(one, _text(spec, one, pipeline)) for spec, one in zip(specs, ended, strict=True)]


def _each(
    pipeline: Pipeline,
    requests: Sequence[_Asked],
    translated: Callable[[_Asked, int, GatewaySettings], translate.TranslatedRequest],
) -> list[OpenRequest]:
    """Runs requests for vectors, each of at most `max_embed_inputs` inputs. Raises PromptError naming the input."""
    asked, most = [], pipeline.settings.max_embed_inputs
    for at, request in enumerate(requests):
        try:
            asked.append(translated(request, 0, pipeline.settings))
        except ServiceError as error:
            raise of_prompt(error, at, most) from None
    try:
        return batch.run(pipeline, asked, lambda num_ended, num_tokens: None)
    except PromptError as error:
        raise of_prompt(error.error, error.index, most) from None


def _asked(specs: Specs, settings: GatewaySettings) -> list[translate.TranslatedRequest]:
    """Validates specs as the gateway does. Raises PromptError."""
    made = []
    for index, spec in enumerate(specs):
        try:
            made.append(translate.whole(spec, 0, settings))
        except ServiceError as error:
            raise PromptError(index, error) from None
    return made


def _text(spec: types_pb2.GenerationSpec, request: OpenRequest, pipeline: Pipeline) -> str | None:
    """Returns the text of a prompt: as given, or as the chat template rendered it; None for a prompt of ids."""
    if spec.HasField("text"):
        return spec.text
    if spec.HasField("token_ids") or request.prompt is None:
        return None
    ids = pack_ids(prompt_ids(request.prompt))
    return pipeline.encoder.decode(ids, pipeline.settings.limits, skip_special_tokens=False)


@contextlib.contextmanager
def _progress(total: int, *, is_on: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on stderr, unless that is no terminal.

    Gives a function that takes the number of ended prompts and of their tokens.
    """
    if not is_on or not sys.stderr.isatty():
        yield lambda num_ended, num_tokens: None
        return
    # Imported here, so that calls without a bar do not wait for the import.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("prompts", total=total, tokens=0)
        yield lambda num_ended, num_tokens: progress.update(task, completed=num_ended, tokens=num_tokens)
