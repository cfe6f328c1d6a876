"""Documents that speedscope opens, checked against what its schema requires."""

import json

from sluice_server.services.profiles.speedscope import Frame, SampledProfile, document

OUTER, INNER, OTHER = Frame("main", "a.py", 1), Frame("f", "a.py", 7), Frame("g", "b.py", 3)


def test_frames_are_listed_once_and_samples_name_them_from_the_outermost_on() -> None:
    first = SampledProfile("main", "seconds", [(OUTER, INNER), (OUTER,)], [0.25, 0.5])
    made = json.loads(document("engine-0", [first, SampledProfile("b", "seconds", [(OTHER,)], [1.0])], "sluice"))
    assert made["shared"]["frames"] == [
        {"name": "main", "file": "a.py", "line": 1},
        {"name": "f", "file": "a.py", "line": 7},
        {"name": "g", "file": "b.py", "line": 3},
    ]
    assert [one["samples"] for one in made["profiles"]] == [[[0, 1], [0]], [[2]]]
    assert [one["endValue"] for one in made["profiles"]] == [0.75, 1.0]
    assert {one["type"] for one in made["profiles"]} == {"sampled"}
    assert made["$schema"].startswith("https://www.speedscope.app/") and made["activeProfileIndex"] == 0


def test_a_profile_without_samples_is_a_document_too() -> None:
    assert json.loads(document("x", [], "sluice"))["profiles"] == []
