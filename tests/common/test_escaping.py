import pytest

from common.errors import OneLineParser, UserError, run_command
from common.escaping import code_span, in_markdown, printable, some_of, without_secrets

HOSTILE = "a\x1b[31m\r\nb\x9b2J\u2028c\u202ed\x07"


def test_a_name_cannot_end_its_line_nor_command_the_terminal() -> None:
    assert printable(HOSTILE) == r"a\x1b[31m\r\nb\x9b2J\u2028c\u202ed\x07"


@pytest.mark.parametrize("text", ["Sci/Tech", "Grüße", "می\u200cخواهم", "👩\u200d💻", "体育", r"C:\news"])
def test_ordinary_names_in_any_script_are_printed_as_they_are(text: str) -> None:
    assert printable(text) == text


def test_markdown_shows_a_name_as_it_is() -> None:
    name = "<img src=x>|![a](http://b)`c`\n# *d* &lt; \\"
    assert in_markdown(name) == r"\<img src=x\>\|\!\[a\](http://b)\`c\`\\n# \*d\* \&lt; \\"
    assert in_markdown("Sci/Tech (new), C#") == "Sci/Tech (new), C#"


@pytest.mark.parametrize(
    ("name", "expected"), [("news", "`news`"), ("a`b", "`` a`b ``"), ("``", "``` `` ```"), ("a\n\nb", r"`a\n\nb`")]
)
def test_a_name_cannot_end_the_code_that_it_stands_in(name: str, expected: str) -> None:
    assert code_span(name) == expected


@pytest.mark.parametrize("is_argument", [True, False])
def test_an_error_is_one_line_whatever_name_is_in_it(capsys: pytest.CaptureFixture[str], is_argument: bool) -> None:
    def main() -> None:
        if is_argument:
            OneLineParser().parse_args([f"--{HOSTILE}"])
        raise UserError(f"{HOSTILE}: is not a model", code="model-unusable")

    with pytest.raises(SystemExit):
        run_command(main)

    line = capsys.readouterr().err
    assert line.removesuffix("\n").isprintable()
    assert r"a\x1b[31m\r\nb" in line


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("--dataset ftp://user:pw@host/x: no", "--dataset ftp://host/x: no"),
        ("s3://key:sec/r+et@bucket/run: no", "s3://bucket/run: no"),
        ("HTTPS://u:p@h/model", "HTTPS://h/model"),
        ("mysql://u:p@ss@h/db", "mysql://h/db"),
        ("https://token@h/a and sftp://u:p@h:22/b", "https://h/a and sftp://h:22/b"),
        ("http://h:8080/models@v1, s3://bucket/a@b", "http://h:8080/models@v1, s3://bucket/a@b"),
        ("$HF_TOKEN", "$HF_TOKEN"),
    ],
)
def test_messages_have_no_password_of_an_address_nor_a_secret_of_the_environment(
    message: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert without_secrets(message.replace("$HF_TOKEN", "hf_abcdefgh")) == shown
    UserError(message).say()
    assert capsys.readouterr().err == f"error: {shown}\n"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["World", "Sports", "Business", "Sci/Tech"], "World, Sports, Business, Sci/Tech"),
        ([f"intent_{number:03}" for number in range(150)], "intent_000, intent_001, intent_002 and 147 more"),
        (["a" * 200, "b"], f"{'a' * 200} and 1 more"),
        (["one\nline"], r"one\nline"),
        ([], ""),
    ],
)
def test_names_fit_into_one_line_which_says_how_many_are_left_out(names: list[str], expected: str) -> None:
    assert some_of(names, width=40) == expected
