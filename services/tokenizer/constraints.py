"""Compiles constraints to grammars that an engine can follow: tests them in child processes, and caches the results.

A constraint that exceeds a limit fails its own request only. Thread-safe.
"""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

import msgspec

from sluice_server.engine.errors import Code, ServiceError, invalid, unsupported
from sluice_server.services.messages.work import ConstraintForm
from sluice_server.services.tokenizer.child_pool import (
    PATIENCE,
    ChildPool,
    CpuTimeLimit,
    DiedError,
    OverdueError,
    UnreadyError,
)
from sluice_server.services.tokenizer.grammar_frames import (
    Answer,
    Compiled,
    GrammarJob,
    GrammarSetup,
    InvalidGrammar,
    TooComplex,
    UnsupportedGrammar,
)

MODULE = "sluice_server.services.tokenizer.grammar_child"
MEMORY_BYTES = 256 << 20  # of address space for grammars, in each child
MAX_REMEMBERED = 4 << 20  # bytes of cached jobs and grammars


class Constraints:
    """Compiles constraints in at most `num` child processes.

    Attributes:
        executor: the threads on which to call `compile`: one for each child.
    """

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        num: int = 1,
        patience: CpuTimeLimit = PATIENCE,
    ) -> None:
        setup = GrammarSetup(str(tokenizer), vocab_size, eos_ids, MEMORY_BYTES)
        self._children: ChildPool[Answer] = ChildPool(MODULE, setup, _decode, num, patience)
        self.executor = ThreadPoolExecutor(num, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._num_bytes = 0

    def known(self, job: GrammarJob) -> str | None:
        """Returns the grammar of a job if it is in the cache, else None."""
        key = msgspec.msgpack.encode(job)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def compile(self, job: GrammarJob) -> str:
        """Returns the grammar of a job. Raises ServiceError naming the field, the error and its place."""
        grammar = self.known(job)
        if grammar is None:
            grammar = self._compile(job)
            self._remember(msgspec.msgpack.encode(job), grammar)
        return grammar

    def close(self) -> None:
        """Ends threads and children, after running compilations have ended."""
        self.executor.shutdown(cancel_futures=True)
        self._children.close()

    def _compile(self, job: GrammarJob) -> str:
        field = field_of(job)
        try:
            answer = self._children.ask(job)
        except OverdueError as error:
            limit = error.limit_s
            raise invalid(field, f"did not compile within {limit:g} s: make it simpler", limit=limit) from error
        except DiedError as error:
            raise _too_complex(field) from error
        except UnreadyError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "NO_CONSTRAINTS",
                f"{field}: output cannot be constrained with this model's tokenizer; leave it out",
                field=field,
            ) from error
        match answer:
            case Compiled():
                return answer.grammar
            case InvalidGrammar():
                raise invalid(field, _said(answer), **({"place": answer.place} if answer.place else {}))
            case UnsupportedGrammar():
                raise unsupported(field, f"{field}: {_said(answer)}")
            case TooComplex():
                raise _too_complex(field)
            case _:
                assert_never(answer)

    def _remember(self, key: bytes, grammar: str) -> None:
        with self._lock:
            if key not in self._known:
                self._num_bytes += len(key) + len(grammar)
            self._known[key] = grammar
            while self._num_bytes > MAX_REMEMBERED:
                old, dropped = self._known.popitem(last=False)
                self._num_bytes -= len(old) + len(dropped)


def field_of(job: GrammarJob) -> str:
    """Returns the request field that the job comes from."""
    if job.constraint is None:
        return "chat.tools"
    form = job.constraint.form
    return "constraint.choice.texts" if form is ConstraintForm.CHOICE else f"constraint.{form}"


def _said(answer: InvalidGrammar | UnsupportedGrammar) -> str:
    return f"{answer.message} (at {answer.place})" if answer.place else answer.message


def _too_complex(field: str) -> ServiceError:
    return invalid(
        field, f"is too complex: to compile and follow it takes more than {MEMORY_BYTES >> 20} MiB or a token's time"
    )


def _decode(answer: bytes) -> Answer:
    decoded: Answer = msgspec.msgpack.decode(answer, type=Answer)
    return decoded
