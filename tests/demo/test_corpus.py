"""The split of the corpus depends on paths alone, and takes Python source only."""

from pathlib import Path

from sluice_server.demo import corpus


def write(root: Path, names: list[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_the_split_does_not_depend_on_the_order_or_on_other_files(tmp_path: Path) -> None:
    names = [f"package/module_{i}.py" for i in range(60)]
    write(tmp_path / "one", names)
    write(tmp_path / "two", [*reversed(names), "added.py"])
    one, two = corpus.collect(tmp_path / "one"), corpus.collect(tmp_path / "two")
    assert [document for document in two.train if document.path != "added.py"] == list(one.train)
    assert [document for document in two.held_out if document.path != "added.py"] == list(one.held_out)
    assert one.held_out and not set(one.train) & set(one.held_out)
    assert [document.path for document in one.train] == sorted(document.path for document in one.train)


def test_known_paths_stay_on_their_side() -> None:
    assert corpus.is_held_out("sysconfig.py") and corpus.is_held_out("nntplib.py")
    assert not corpus.is_held_out("os.py") and not corpus.is_held_out("json/decoder.py")


def test_about_a_tenth_is_held_out() -> None:
    held_out = sum(corpus.is_held_out(f"package/module_{i}.py") for i in range(2000))
    assert 150 < held_out < 250


def test_tests_tables_and_what_was_installed_are_left_out(tmp_path: Path) -> None:
    left_out = ["test/a.py", "unittest/test/a.py", "site-packages/x/a.py", "encodings/cp1.py", "config-3/a.py"]
    write(tmp_path, [*left_out, "_sysconfigdata__linux.py", "test.py", "kept/a.py", "kept/a.txt"])
    assert sorted(corpus.source_names(tmp_path)) == ["kept/a.py", "test.py"]


def test_a_file_that_is_not_utf8_does_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (document,) = corpus.collect(tmp_path).train + corpus.collect(tmp_path).held_out
    assert document.text == "name = '\ufffd'\n"
