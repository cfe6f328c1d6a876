"""The files of a batch: what a line may be, and what a file of answers keeps of a run that was broken off."""

import json
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.batch_file import AnswerFile, BadLineError, lines_of, read

RIGHT = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_a_line_is_a_request() -> None:
    request = read(json.dumps(RIGHT).encode())
    assert (request.custom_id, request.url, request.body) == ("a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_id": ""}, "custom_id is empty"),
        ({"custom_id": 7}, "custom_id"),
        ({"method": "GET"}, "'GET' is not POST"),
        ({"url": "/v1/responses"}, "'/v1/responses' is not served in a batch; /v1/chat/completions, /v1/completions"),
        ({"body": {"stream": True}}, "body.stream"),
        ({"body": [1]}, "body"),
        ({"priority": 1}, "priority"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadLineError, match=said):
        read(json.dumps({**RIGHT, **changes}).encode())


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_said(line: bytes) -> None:
    with pytest.raises(BadLineError):
        read(line)


def test_answers_are_known_to_the_next_run_and_a_torn_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as out:
        out.answered("a", 200, "r1", {"x": 1})
        out.refused(7, "is no request")
        with pytest.raises(ServiceError, match=r"OUTPUT: .*another run"):
            AnswerFile(path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    with AnswerFile(path) as out:
        assert (out.known, out.bad_lines) == ({"a"}, {7})
        out.answered("b", 400, "r2", {"error": {}})
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert path.read_bytes().startswith(whole) and [one["custom_id"] for one in lines] == ["a", None, "b"]
    assert lines[0]["response"] == {"status_code": 200, "request_id": "r1", "body": {"x": 1}}
    assert lines[1]["error"] == {"code": "invalid_request", "message": "line 7: is no request"}


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"id": "x"}'])
def test_another_file_is_never_written_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ServiceError, match=r"OUTPUT: line 1 of .* is no answer"):
        AnswerFile(path)
    assert path.read_text() == text
    for call in (lambda: AnswerFile(tmp_path / "no" / "out"), lambda: list(lines_of(tmp_path / "no"))):
        with pytest.raises(ServiceError, match="PUT: cannot "):
            call()
