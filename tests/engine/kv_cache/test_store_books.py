"""What the store of the host is believed to have: bounded, and cleared by owner."""

from sluice_server.engine.kv_cache.prefix import names_of, owner_of, tenant_root
from sluice_server.engine.kv_cache.store_books import StoreBooks


def test_what_was_heard_of_longest_ago_goes_first() -> None:
    books = StoreBooks(most=3)
    books.add([b"a", b"b", b"c"])
    books.add([b"a", b"d"])
    assert [name in books for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True] and len(books) == 3
    books.discard(b"a")
    books.discard(b"q")
    assert b"a" not in books and len(books) == 2


def test_an_owners_names_are_forgotten_and_no_others() -> None:
    books = StoreBooks()
    (mine,), (theirs,) = (names_of(tenant_root(b"identity", tenant), [1, 2], 2) for tenant in ("a", "b"))
    books.add([mine, theirs])
    books.clear(owner_of("a"))
    assert mine not in books and theirs in books
    books.clear(b"")
    assert not len(books)
