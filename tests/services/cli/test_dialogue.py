import pytest

from sluice_server.services.cli.dialogue import Dialogue


def asked(*lines: str) -> Dialogue:
    dialogue = Dialogue()
    for line in lines:
        if dialogue.typed(line) is None:
            dialogue.answered(f"to {line}")
    return dialogue


def test_questions_and_answers_alternate_behind_the_instructions() -> None:
    dialogue = asked("/system be brief", "a", "b")
    assert dialogue.messages() == [
        ("system", "be brief"),
        ("user", "a"),
        ("assistant", "to a"),
        ("user", "b"),
        ("assistant", "to b"),
    ]


def test_an_answer_without_a_word_takes_its_question_back() -> None:
    dialogue = Dialogue()
    assert dialogue.typed("a") is None
    dialogue.answered("")
    assert dialogue.messages() == []


def test_retry_asks_the_last_question_again() -> None:
    dialogue = asked("a", "b")
    assert dialogue.typed("/retry") is None
    assert dialogue.messages()[-1] == ("user", "b")
    assert Dialogue().typed("/retry") == "nothing was asked yet"


def test_undo_takes_one_exchange_back() -> None:
    dialogue = asked("a", "b", "/undo")
    assert dialogue.messages() == [("user", "a"), ("assistant", "to a")]
    assert asked("a", "/clear").messages() == []


def test_parameters_are_numbers_and_can_be_given_back() -> None:
    dialogue = asked("/set temperature 0.5", "/set max_tokens 7")
    assert dialogue.parameters == {"temperature": 0.5, "max_tokens": 7}
    assert dialogue.typed("/set max_tokens many") == "'many' is no number for max_tokens"
    assert dialogue.typed("/set heat 1") is not None and "no parameter" in str(dialogue.typed("/set heat 1"))
    dialogue.typed("/set temperature")
    assert dialogue.parameters == {"max_tokens": 7}


@pytest.mark.parametrize(("line", "shown"), [("", ""), ("  ", ""), ("/dance", "/dance is no command"), ("/help", "/q")])
def test_what_is_no_question_is_answered_here(line: str, shown: str) -> None:
    dialogue = Dialogue()
    assert shown in str(dialogue.typed(line)) and dialogue.turns == []


def test_quit_ends_it() -> None:
    assert asked("/quit").has_ended and not asked("/stats").shows_stats
