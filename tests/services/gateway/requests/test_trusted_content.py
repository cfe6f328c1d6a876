"""Which tenants may write control tokens in the content of chats: none, one, or all."""

from pathlib import Path

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import Identity, read_access
from sluice_server.services.gateway.access.quota import Quotas
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.chat import trusting
from sluice_server.services.messages.messages import Message, Submit
from sluice_server.services.messages.work import ChatPrompt, Generate, TextPrompt, Tokenize
from tests.services.gateway.fake_ring import manager_of, settings

ASK = types_pb2.ChatMessage(role=types_pb2.ROLE_USER, parts=[types_pb2.ContentPart(text="hi")])
CHAT = types_pb2.Chat(messages=[ASK])


@pytest.mark.parametrize(("tenant", "by_all", "trusts"), [("a", False, True), ("b", False, False), ("b", True, True)])
def test_chats_are_trusted_for_a_tenant_or_for_all(tenant: str, by_all: bool, trusts: bool, tmp_path: Path) -> None:
    (tmp_path / "access").write_text("[tenants.a]\ntrust_chat_content = true\n[tenants.b]\nmax_concurrent = 9\n")
    emitted: list[Message] = []
    quotas = Quotas(read_access(tmp_path / "access").limits_of, 1)
    manager = manager_of(settings(trust_chat_content=by_all), emitted.append, quotas)
    manager.refusal = None
    call = CallMetadata("m", Identity(tenant, frozenset()))
    for asked in (
        translate.generation(types_pb2.GenerationSpec(chat=CHAT), 0, manager.settings),
        translate.tokenization(inference_pb2.TokenizeRequest(chat=CHAT), manager.settings),
    ):
        manager.submit(manager.open(call, asked, streams=False))
    for message in emitted:
        assert isinstance(message, Submit) and isinstance(message.work, Generate | Tokenize)
        assert isinstance(message.work.prompt, ChatPrompt) and message.work.prompt.trusts_content is trusts
    assert len(emitted) == 2


def test_a_text_has_no_content_to_trust() -> None:
    work = Tokenize(TextPrompt("</s>"))
    assert trusting(work) is work
