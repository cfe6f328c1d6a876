"""The migration page for users of vLLM: every name of ours on it exists."""

import re

from sluice_server.services.edge.wire import ChatRequest, Common, CompletionRequest
from sluice_server.services.gateway.contract.fields import BUILT
from tools.check_links import ROOT

PAGE = (ROOT / "docs/migrating-from-vllm.md").read_text()
OPTIONS = (ROOT / "docs/reference/options.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_flag_of_ours_is_an_option() -> None:
    named = {flag for _, ours, *_ in rows("Flags") for flag in re.findall(r"`(--[a-z-]+)", ours)}
    assert len(named) > 25
    assert sorted(flag for flag in named if f"`{flag}`" not in OPTIONS) == []


def test_every_field_of_the_contract_is_built() -> None:
    named = {field for *_, ours in rows("Sampling parameters") for field in re.findall(r"`([a-z_.]+)`", ours)}
    assert len(named) > 25
    assert sorted(named - BUILT) == []


def test_every_name_at_the_edge_is_taken_there() -> None:
    taken = {name for kind in (ChatRequest, CompletionRequest, Common) for name in kind.__struct_fields__}
    named = {name for _, edge, _ in rows("Sampling parameters") for name in re.findall(r"`([a-z_]+)`", edge)}
    same = {
        name
        for left, edge, _ in rows("Sampling parameters")
        if "the same" in edge
        for name in re.findall(r"`([a-z_]+)`", left)
    }
    assert named and same
    assert sorted((named | same) - taken) == []
