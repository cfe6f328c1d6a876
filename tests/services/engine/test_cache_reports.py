from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.kv_cache.log import NamedBlock
from sluice_server.engine.kv_cache.prefix import name_block, tenant_root
from sluice_server.services.engine.cache_reports import MAX_BLOCKS, CacheReports
from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import CacheChanges, CacheQuery
from sluice_server.services.messages.work import ints
from tests.services.engine.test_engine_stage import make, prompt, run

ROOT = tenant_root(UNNAMED.encoded(), "acme")


def block(parent: bytes, *tokens: int) -> NamedBlock:
    return NamedBlock(name_block(parent, tokens), parent, ROOT, tokens)


def changes(sent: list[Message]) -> list[CacheChanges]:
    return [one for one in sent if isinstance(one, CacheChanges)]


def test_blocks_are_told_with_their_tenant_in_messages_of_bounded_size() -> None:
    sent: list[Message] = []
    engine = make(has_log=True)[0].engine
    log = engine.scheduler.cache.index.log
    assert log is not None
    reports = CacheReports(engine, "e0", 7, sent.append)
    reports.know(ROOT, "acme")
    first = block(ROOT, 1, 2)
    log.add(first)
    log.add(block(first.name, 3, 4))
    reports.report()
    reports.report()
    (told,) = changes(sent)
    assert (told.engine_id, told.epoch, told.number, told.is_whole) == ("e0", 7, 0, True)
    assert [(one.tenant, one.parent, list(ints(one.ids))) for one in told.added] == [
        ("acme", b"", [1, 2]),
        ("acme", first.name, [3, 4]),
    ]
    names = [first.name]
    for at in range(MAX_BLOCKS):
        log.add(block(ROOT, 9, at))
        names.append(block(ROOT, 9, at).name)
    reports.report()
    for name in names:
        log.remove(name)
    log.add(first)
    reports.report()
    assert [(one.number, len(one.removed), len(one.added)) for one in changes(sent)] == [
        (0, 0, 2),
        (1, 0, MAX_BLOCKS),
        (2, MAX_BLOCKS, 0),
        (3, 1, 1),
    ]


def test_an_engine_tells_its_cache_and_again_when_asked() -> None:
    stage, sent = make()
    run(stage)
    assert changes(sent) == []  # without a log
    stage, sent = make(has_log=True)
    stage.handle(prompt(max_tokens=8))
    run(stage)
    assert changes(sent)[0].is_whole
    told = [one for message in changes(sent) for one in message.added]
    assert list(ints(told[0].ids)) == [5, 6, 7, 9] and told[0].parent == b""
    stage.handle(CacheQuery("g"))
    stage.turn()
    again = changes(sent)[-1]
    assert again.is_whole and again.added == tuple(told)
