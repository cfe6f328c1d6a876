import pytest

from sluice_server.engine.request import Limits
from sluice_server.services.cli.dialogue import Dialogue
from sluice_server.services.config import bad_setting


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


def test_exit_ends_it() -> None:
    assert asked("/exit").has_ended


def test_a_value_that_the_server_would_refuse_is_refused_here() -> None:
    dialogue = Dialogue(limits=Limits(context_length=100, vocab_size=9))
    assert dialogue.typed("/set max_tokens 101") == "max_tokens: 101 is not in [0, 100]"
    assert dialogue.typed("/set max_tokens 0") == "max_tokens: 0 is below 1; leave it out for the default"
    assert dialogue.typed("/set temperature nan") == "temperature: nan is not in [0.0, 100.0]"
    assert dialogue.parameters == {}


def test_defaults_hold_until_something_is_set_and_again_when_it_is_given_back() -> None:
    dialogue = Dialogue(defaults={"temperature": 0.7})
    assert dialogue.typed("/set") == "temperature 0.7; the model's defaults for the rest"
    dialogue.typed("/set temperature 0")
    assert dialogue.sampling() == {"temperature": 0.0}
    assert dialogue.typed("/set temperature") == "temperature: 0.7" and dialogue.sampling() == {"temperature": 0.7}
    assert dialogue.typed("/set seed") == "seed: the default of the model"


def test_a_question_without_an_answer_can_be_asked_again_until_the_next() -> None:
    dialogue = Dialogue()
    dialogue.typed("a")
    dialogue.answered("")
    assert dialogue.typed("/retry") is None and dialogue.messages() == [("user", "a")]
    dialogue.answered("yes")
    assert dialogue.unanswered == ""
    dialogue.typed("b")
    dialogue.answered("")
    dialogue.typed("/clear")
    assert dialogue.typed("/retry") == "nothing was asked yet"


def test_turns_are_left_out_by_whole_exchanges_and_never_the_question() -> None:
    dialogue = asked(*"abcdefgh")
    dialogue.typed("i")
    dropped = [0]
    while (more := dialogue.more_dropped(dropped[-1])) != dropped[-1]:
        dropped.append(more)
        assert dialogue.messages(more)[0][0] == "user" and dialogue.messages(more)[-1] == ("user", "i")
    assert dropped == [0, 4, 8, 10, 12, 14, 16]
    assert Dialogue().more_dropped(0) == 0


def test_a_question_that_is_not_typed_has_no_commands() -> None:
    dialogue = Dialogue()
    dialogue.asked("/etc/passwd")
    assert dialogue.messages() == [("user", "/etc/passwd")]


def test_pictures_belong_to_the_next_question() -> None:
    def read(path: str) -> bytes:
        if path == "none.png":
            raise bad_setting("image", "none.png: No such file or directory")
        return path.encode()

    dialogue = Dialogue(read_image=read)
    assert "No such file" in (dialogue.typed("/image none.png") or "")
    assert dialogue.typed("/image") == "/image FILE: which file?"
    assert dialogue.typed("/image a.png") == "1 with the next question"
    assert dialogue.typed("/image b.png") == "2 with the next question"
    assert dialogue.typed("what is it?") is None
    asked = ("user", (b"a.png", b"b.png", "what is it?"))
    assert dialogue.messages() == [asked]
    dialogue.answered("")  # it failed
    assert dialogue.typed("/retry") is None and dialogue.messages() == [asked]
    dialogue.answered("a cat")
    dialogue.typed("are you sure?")
    assert dialogue.messages()[-1] == ("user", "are you sure?")
