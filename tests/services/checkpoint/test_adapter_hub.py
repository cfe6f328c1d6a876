"""Adapters from a hub: allowed repositories only, two files of one commit, sizes first, and again from the cache."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.request import AdapterRef, EngineRequest, SamplingParams
from sluice_server.services.checkpoint.adapter_hub import AdapterHub, allowed_of
from tests.engine.test_engine_oracle import ROOMY, SHAPES, make_engine
from tests.oracle.adapters import write_adapter
from tests.oracle.checkpoints import make_checkpoint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LIMITS = {CONFIG: 1000, WEIGHTS: 2000}
FIRST, SECOND = "a" * 40, "b" * 40


@dataclasses.dataclass
class FakeHub:
    """A hub, and its cache below a folder: files by commit, of which `main` is the newest."""

    cache: Path
    commits: dict[str, dict[str, bytes]]
    main: str = FIRST
    is_reachable: bool = True
    downloads: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def download(
        self, repository: str, name: str, revision: str, dry_run: bool = False, local_files_only: bool = False
    ) -> Any:  # noqa: ANN401 # as the hub's client gives it
        commit = self.main if revision == "main" else revision
        folder = self.cache / f"models--{repository.replace('/', '--')}"
        path = folder / "snapshots" / commit / name
        if local_files_only or not self.is_reachable:
            if not path.exists():
                raise LocalEntryNotFoundError("not here")
            return SimpleNamespace(file_size=path.stat().st_size, commit_hash=commit) if dry_run else str(path)
        if name not in self.commits[commit]:
            raise EntryNotFoundError("404")
        content = self.commits[commit][name]
        if dry_run:
            return SimpleNamespace(file_size=len(content), commit_hash=commit)
        self.downloads.append((commit, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / "blobs").mkdir(exist_ok=True)
        (folder / "blobs" / f"{commit}-{name}").write_bytes(content)
        path.unlink(missing_ok=True)
        path.symlink_to(folder / "blobs" / f"{commit}-{name}")
        return str(path)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    def made(**commits: dict[str, bytes]) -> FakeHub:
        hub = FakeHub(tmp_path / "cache", {name * 40: files for name, files in commits.items()})
        monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
        return hub

    return made


def test_both_files_are_of_one_commit_which_the_path_pins(make: Callable[..., FakeHub]) -> None:
    hub = make(a={CONFIG: b"{}", WEIGHTS: b"1"}, b={CONFIG: b"{}", WEIGHTS: b"22"})
    found = AdapterHub("org/*").fetch("org/one", LIMITS)
    assert found is not None and found.path == f"org/one@{FIRST}"
    assert (found.root / found.folder / WEIGHTS).read_bytes() == b"1"
    hub.main = SECOND
    again = AdapterHub("org/*").fetch(found.path, LIMITS)
    assert again == found and hub.downloads == [(FIRST, CONFIG), (FIRST, WEIGHTS)]
    newer = AdapterHub("org/*").fetch("org/one", LIMITS)
    assert newer is not None and newer.path == f"org/one@{SECOND}"


def test_without_the_network_the_cache_is_read(make: Callable[..., FakeHub]) -> None:
    hub = make(a={CONFIG: b"{}", WEIGHTS: b"1"})
    first = AdapterHub("org/one").fetch("org/one", LIMITS)
    hub.is_reachable = False
    assert AdapterHub("org/one").fetch("org/one", LIMITS) == first
    with pytest.raises(ServiceError, match="LocalEntryNotFoundError; check the id and the network") as error:
        AdapterHub("org/*").fetch("org/other", LIMITS)
    assert error.value.reason == "ADAPTER_NOT_FOUND"


@pytest.mark.parametrize(
    "path", ["other/one", "org", "org/one/two", "../org", "org/..", "/org/one", "org/one@", "org/one@../x", "org/", ""]
)
def test_what_is_not_allowed_is_not_asked_for(path: str, make: Callable[..., FakeHub]) -> None:
    hub = make(a={})
    assert AdapterHub("org/one,org/two").fetch(path, LIMITS) is None
    assert not hub.downloads


def test_pickles_and_large_files_are_not_downloaded(make: Callable[..., FakeHub]) -> None:
    hub = make(a={CONFIG: b"{}", "adapter_model.bin": b"x"})
    with pytest.raises(ServiceError, match=r"has no adapter_model\.safetensors at the hub: other files, pickles among"):
        AdapterHub("org/*").fetch("org/one", LIMITS)
    hub.commits[FIRST] = {CONFIG: b"{}", WEIGHTS: b"1" * 2001}
    with pytest.raises(ServiceError, match="has 2001 bytes; an adapter of this base has at most 2000"):
        AdapterHub("org/*").fetch("org/one", LIMITS)
    assert {name for _, name in hub.downloads} == {CONFIG}


@pytest.mark.parametrize("setting", ["*", "org", "org/**", "*/one", "org/one/*", "org/o*", "../one"])
def test_patterns_that_allow_more_than_an_organisation_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        allowed_of(setting)
    assert allowed_of(" org/one, org/* ,") == ("org/one", "org/*")


def test_a_loader_reads_folders_first_then_what_was_fetched(make: Callable[..., FakeHub], tmp_path: Path) -> None:
    """Read again from the commit that its path has, although the repository has gone on."""
    directory = make_checkpoint(tmp_path / "base", SHAPES["llama"])
    for seed, name in enumerate(("org/here", "elsewhere")):
        write_adapter(tmp_path / "adapters" / name, read_config(directory), seed=seed, rank=2)
    files = {name: (tmp_path / "adapters" / "elsewhere" / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    hub = make(a=files, b={CONFIG: b"{}", WEIGHTS: b""})
    engine = make_engine(directory, dataclasses.replace(ROOMY, max_adapters=1, adapter_dir=str(tmp_path / "adapters")))
    assert engine.adapters is not None
    engine.adapters.loader.sources.fetch = AdapterHub("org/*").fetch
    here, elsewhere, there = (engine.adapters.read(path).result() for path in ("org/here", "elsewhere", "org/there"))
    assert (here.path, there.path) == ("org/here", f"org/there@{FIRST}")
    assert there.digest == elsewhere.digest != here.digest
    hub.main, hub.is_reachable = SECOND, False
    assert engine.adapters.read(there.path).result().digest == there.digest
    with pytest.raises(ServiceError, match="no folder 'other/one'"):
        engine.adapters.read("other/one").result()
    ref = AdapterRef(there.digest, there.path, there.num_bytes)
    engine.add(EngineRequest("a" * 32, (1, 2, 3), SamplingParams(max_tokens=2, temperature=0.0), adapter=ref))
    while engine.has_work:
        assert not engine.step().failed
    engine.adapters.close()


def test_without_a_folder_of_adapters_only_the_hub_is_read() -> None:
    with pytest.raises(ServiceError, match="'x/y' is no repository that --adapter-hub allows"):
        AdapterSources(None).local("x/y")
