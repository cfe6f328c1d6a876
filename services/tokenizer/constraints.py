"""Constraints of outputs to grammars that an engine can follow: tried out in child processes, then remembered.

A form that takes too long or too much costs its own request. Thread-safe; what was compiled lately is known at once.
Knows no grammar and no engine.
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
MEMORY_BYTES = 256 << 20  # of address space for grammars
MAX_REMEMBERED = 4 << 20  # bytes of jobs and their grammars


class Constraints:
    """As many children as compile at once, at most `num`.

    Attributes:
        executor: where `compile` is to be called: as many threads as there are children.
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
        """The grammar, if it was compiled lately."""
        key = msgspec.msgpack.encode(job)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def compile(self, job: GrammarJob) -> str:
        """The grammar. Raises ServiceError naming the field, what is wrong with it and where."""
        grammar = self.known(job)
        if grammar is None:
            grammar = self._compile(job)
            self._remember(msgspec.msgpack.encode(job), grammar)
        return grammar

    def close(self) -> None:
        """End threads and children, when what is compiling has ended."""
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
    """The field that asked for it."""
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
