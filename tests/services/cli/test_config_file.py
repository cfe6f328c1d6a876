"""The file of --config: names and values of the command line, and which of flag, variable and file wins."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice_server.engine.config import AUTO, EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.config import ServiceConfig, to_environment

RIGHT = {
    "a.yaml": "max-num-seqs: 8\nlisten: 127.0.0.1:1\ngrace-s: 3\nreflection: false\n",
    "a.toml": 'max-num-seqs = 8\nlisten = "127.0.0.1:1"\ngrace_s = 3\nreflection = false\n',
}


def given(*options: str, **environment: str) -> tuple[EngineConfig, ServiceConfig]:
    """The settings that a command is called with. Raises the ServiceError of a wrong one."""
    seen: list[tuple[EngineConfig, ServiceConfig]] = []
    app = typer.Typer()

    def command(engine: EngineConfig, service: ServiceConfig) -> None:
        seen.append((engine, service))

    app.command()(takes_settings(command))
    result = CliRunner().invoke(app, options, env=environment)
    if isinstance(result.exception, ServiceError):
        raise result.exception
    return seen[0]


@pytest.mark.parametrize("name", RIGHT)
def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(RIGHT[name])
    engine, service = given("--config", str(file))
    assert (engine.max_num_seqs, service.listen, service.grace_s, service.reflection) == (8, "127.0.0.1:1", 3.0, False)
    both = {"SLUICE_CONFIG": str(file), "SLUICE_MAX_NUM_SEQS": "9", "SLUICE_LISTEN": "127.0.0.1:2"}
    engine, service = given("--listen", "127.0.0.1:3", "--reflection", **both)
    assert (engine.max_num_seqs, service.listen, service.grace_s, service.reflection) == (9, "127.0.0.1:3", 3.0, True)


@pytest.mark.parametrize(("value", "size"), [("auto", AUTO["auto"]), ("64", 64)])
def test_a_number_that_may_be_a_word_is_the_same_wherever_it_is_given(tmp_path: Path, value: str, size: int) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"block-size: {value}")
    for options, environment in (
        (("--block-size", value), {}),
        ((), {"SLUICE_BLOCK_SIZE": value}),
        (("--config", str(file)), {}),
    ):
        engine, _ = given(*options, **environment)
        assert engine.block_size == size
    assert given()[0].block_size == EngineConfig().block_size


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "block-size: small", "block-size: 'small' is not a whole number"),
        ("a.yaml", "max-num-seqs: auto", "max-num-seqs: 'auto' is not a whole number"),
        ("a.yaml", "max-num-seq: 8", "'max-num-seq' is no option of serve; did you mean 'max-num-seqs'"),
        ("a.toml", "xyzzy = 8", "'xyzzy' is no option of serve; `sluice serve --help`"),
        ("a.yaml", "dtype: float32\ndtype: bfloat16", "'dtype' stands there twice"),
        ("a.yaml", "max-num-seqs: 1\nmax_num_seqs: 2", "'max_num_seqs' stands there twice"),
        ("a.yaml", "revision: 12", "revision: 12 is not text; put it in quotes"),
        ("a.yaml", "max-num-seqs: 8.5", "max-num-seqs: 8.5 is not a whole number"),
        ("a.yaml", "max-num-seqs: true", "max-num-seqs: True is not a whole number"),
        ("a.yaml", "dtype:", "dtype: None is not text"),
        ("a.yaml", "- dtype", "is no list of"),
        ("a.yaml", "dtype: [", "while parsing"),
        ("a.yaml", "dtype: !!python/name:os.system", "could not determine a constructor"),
        ("a.toml", "dtype", "Expected '='"),
        ("a.json", "{}", "ends neither in .yaml"),
        ("a.yaml", None, "cannot read"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ServiceError, match="--config: ") as caught:
        given("--config", str(file))
    assert said in caught.value.message and str(file) in caught.value.message


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# nothing yet\n")
    assert given("--config", str(file)) == (EngineConfig(), ServiceConfig())


def test_a_child_does_not_read_the_file_again() -> None:
    assert to_environment(EngineConfig(), ServiceConfig())["SLUICE_CONFIG"] == ""
    assert given(SLUICE_CONFIG="") == (EngineConfig(), ServiceConfig())


def test_the_model_is_an_argument_too_and_is_given_once(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: of-the-file")
    assert given("mine")[1].model == "mine"
    assert given("mine", "--config", str(file), SLUICE_MODEL="other")[1].model == "mine"
    assert given("--config", str(file))[1].model == "of-the-file"
    with pytest.raises(ServiceError, match="--model: the model is given as 'mine' too"):
        given("mine", "--model", "other")
