"""Output that no reader, encoding or disk breaks a command with, and that commands no terminal."""

import os
import pty
import subprocess
import sys

import pytest
from kill_and_resume import environment

from xtrain.command.streams import shown

# A command that prints a text in pieces, as decoding does, and then says on stderr that it is done.
SPEAKING = """
import sys
from xtrain.command.ending import run_command

def speak(text):
    for piece in text:
        print(piece * 2000, end="", flush=True)
    print(flush=True)
    print("done", file=sys.stderr)
    return 3

sys.exit(run_command("xtrain", speak, "ab\\u2019\\u4e2d\\x1b[31m"))
"""


def speak(stdout, **variables):
    return subprocess.run(
        [sys.executable, "-c", SPEAKING],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment() | variables,
        text=True,
    )


def xtrain(*arguments, **options):
    command = [sys.executable, "-m", "pipelines", *arguments]
    return subprocess.run(command, env=environment(), text=True, **options)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_what_an_encoding_lacks_becomes_a_replacement(encoding):
    done = speak(subprocess.PIPE, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (3, "done\n")
    lacks = "\u2019" if encoding.startswith("utf") else "?"
    assert done.stdout.startswith("a" * 2000 + "b" * 2000 + lacks)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = speak(writer, PYTHONUNBUFFERED=unbuffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, "done\n")


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["dry_run=true"]])
def test_commands_are_quiet_when_their_reader_leaves(arguments, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = xtrain(*arguments, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["dry_run=true"]])
def test_a_full_disk_under_stdout_is_one_line(arguments, tmp_path):
    with open("/dev/full", "w") as full:
        done = xtrain(*arguments, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "xtrain: cannot write stdout: No space left on device\n"


def test_a_closed_stdout_is_no_error(tmp_path):
    command = [sys.executable, "-m", "pipelines", "dry_run=true"]
    shell = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert (shell.returncode, shell.stderr) == (0, "")


def test_a_closed_stderr_ends_no_command(tmp_path):
    command = [sys.executable, "-m", "pipelines", "run=nope"]
    shell = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], env=environment())
    assert shell.returncode == 2


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\x00b\rc\x7f", "a\\x00b\\x0dc\\x7f"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("\ud800", "\\ud800"),
        (
            "two\nlines\tand a tab, na\u00efve \u4e2d\u6587",
            "two\nlines\tand a tab, na\u00efve \u4e2d\u6587",
        ),
    ],
)
def test_what_commands_a_terminal_is_spelled_out(text, spelled):
    assert shown(text) == spelled


@pytest.mark.parametrize(
    "override",
    ["run=\x1b[31m", "data.path=\x1b]0;title\x07", "\x1b[2J", "seed=\x9b2J", "out=\x1b[1m\x00"],
)
def test_an_error_shows_an_escape_in_an_override_spelled_out(
    override, tmp_path, capsys, monkeypatch
):
    from pipelines.__main__ import main

    monkeypatch.chdir(tmp_path)
    assert main([override, "data=text", "dry_run=true", "device=nope"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.rstrip("\n").isprintable()


def test_a_table_shows_an_escape_in_a_cell_spelled_out(capsys):
    from gates.judging.table import print_table

    print_table(["name", "unit"], [["\x1b[31mred", "n\x1b]8;;http://x\x07ats"]])
    assert "\x1b" not in capsys.readouterr().out


def test_a_text_shown_on_a_terminal_is_of_the_model_and_commands_nothing(tmp_path):
    """The end of what decoding prints, on a terminal of its own."""
    script = """
import sys
from pipelines.decode import tell
tell("a\\x1b[31mb\\n")
"""
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", script], stdout=theirs, env=environment(), check=True)
    os.close(theirs)
    assert os.read(ours, 100).replace(b"\r", b"") == b"a\\x1b[31mb\n"
    os.close(ours)
    piped = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment())
    assert piped.stdout == b"a\x1b[31mb\n"
