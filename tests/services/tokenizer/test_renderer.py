"""Templates that loop, fill memory or recurse are refused at a stated limit, and the next request is served."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.messages.work import ChatMessage, ChatPrompt
from sluice_server.services.tokenizer import child_pool as killable
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.child_pool import CpuTimeLimit

ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATE = (
    "{% macro again(x) %}{{ again(x + 1) }}{% endmacro %}"
    "{% set what = messages[0].content %}"
    "{% if what == 'loop' %}" + ENDLESS + "{% endif %}"
    "{% if what == 'recurse' %}{{ again(1) }}{% endif %}"
    "{% if what == 'write' %}{% for a in range(99999) %}{{ 'x' * 99 }}{% endfor %}{% endif %}"
    "{% if what == 'memory' %}{% set x = 'x' * 9999999999 %}{% endif %}"
    "{% if what == 'double' %}{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}{% endif %}"
    "{% if what == 'range' %}{{ range(999999999) | list }}{% endif %}"
    "{% if what == 'dig' %}{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}{% endif %}"
    "{% if what == 'format' %}{{ '%99999999999d' % 1 }}{% endif %}"
    "{% if what == 'refuse' %}{{ raise_exception('z' * 99999) }}{% endif %}"
    "served"
)
WORDS = {
    "loop": "did not end within 0.3 s",
    "recurse": "cannot render",
    "write": "writes more than 10000 bytes",
    "memory": "writes more than 10000 bytes",
    "double": "",  # of time or of memory, as the machine goes
    "range": "cannot render",
    "dig": "cannot render",
    "format": "writes more than 10000 bytes",
    "refuse": "refuses: zzz",
}


def made(source: str = TEMPLATE, num: int = 1) -> ChatTemplate:
    return ChatTemplate(TemplateSource(source), num, CpuTimeLimit(job_s=0.3))


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    template = made()
    yield template
    template.close()


def render(template: ChatTemplate, text: str) -> str:
    return template.render(ChatPrompt((ChatMessage("user", text),)), 10_000).text


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.parametrize("what", list(WORDS))
def test_what_does_not_end_is_refused_and_the_next_is_served(template: ChatTemplate, what: str) -> None:
    with pytest.raises(ServiceError) as caught:
        render(template, what)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "prompt.chat")
    assert WORDS[what] in caught.value.message and len(caught.value.message) < 1200
    assert render(template, "hello") == "served"


def test_text_that_is_not_unicode_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(ServiceError, match="lone surrogate"):
        render(template, "a\ud800")
    assert render(template, "hello") == "served"


def test_large_messages_pass() -> None:
    template = made("{{ messages[0].content }}")
    try:
        text = "é" * 400_000
        assert template.render(ChatPrompt((ChatMessage("user", text),)), 800_000).text == text
        with pytest.raises(ServiceError, match="800002"):
            template.render(ChatPrompt((ChatMessage("user", text + "éé"),)), 800_002)
    finally:
        template.close()


def test_a_template_that_cannot_be_compiled_fails_its_requests() -> None:
    template = made("{{ 1 | no_such_filter }}")
    try:
        for _ in range(2):
            with pytest.raises(ServiceError, match="cannot be compiled") as caught:
                render(template, "hello")
            assert caught.value.code is Code.FAILED_PRECONDITION
    finally:
        template.close()


def test_a_child_that_died_between_two_prompts_is_replaced() -> None:
    template, before = made(), children()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(render, template, "hello").result() == "served"
            (child,) = children() - before
        psutil.wait_procs([child], 10)  # it dies with the thread that made it
        assert render(template, "hello") == "served"
    finally:
        template.close()


def test_a_child_that_the_machine_holds_up_is_waited_for() -> None:
    template, before = ChatTemplate(TemplateSource(TEMPLATE), 1, CpuTimeLimit(job_s=0.2)), children()
    try:
        render(template, "hello")
        (child,) = children() - before
        child.suspend()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(render, template, "hello")
            with pytest.raises(TimeoutError):
                answer.result(timeout=0.5)  # longer than it may compute
            child.resume()
            assert answer.result() == "served"
    finally:
        template.close()


def test_no_process_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killable, "EXECUTABLE", "/nonexistent")
    with pytest.raises(killable.UnstartedError):  # no ServiceError: the stage makes one, and says so in the log
        render(made(), "hello")


def test_a_child_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    template, before = made(), children()
    try:
        render(template, "hello")
        assert [child.environ().get("SECRET") for child in children() - before] == [None]
    finally:
        template.close()


def test_a_loop_delays_no_other_while_another_child_is_free() -> None:
    template, before = ChatTemplate(TemplateSource(TEMPLATE), 2, CpuTimeLimit(job_s=30.0)), children()
    try:
        render(template, "hello")
        with ThreadPoolExecutor(2) as pool:
            loop = pool.submit(render, template, "loop")
            assert pool.submit(render, template, "hello").result() == "served"
            assert not loop.done()
            for child in children() - before:
                child.kill()
            assert isinstance(loop.exception(), ServiceError)
    finally:
        template.close()
