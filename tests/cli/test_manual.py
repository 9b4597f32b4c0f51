"""The man page and completions know every command and option that the program has."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

BINARY = os.environ.get("OSCAR_BIN", str(pathlib.Path(__file__).resolve().parents[2] / "build/release/oscar"))


def output(*args):
    return subprocess.run([BINARY, *args], capture_output=True, text=True, check=True).stdout


def commands():
    listing = output("--help").split("Subcommands:")[1]
    return re.findall(r"^  ([a-z]+) ", listing, re.M)


def options(command):
    return set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", output(command, "--help")))


def test_hidden_from_help():
    assert len(commands()) >= 11 and not {"man", "completions"} & set(commands())


def test_man_page_names_everything():
    page = output("man")
    text = page.replace("\\-", "-")
    for command in commands():
        section = text.split(f".SS oscar {command}\n")[1].split("\n.SS oscar " if command not in ("bench", "rotation") else "\n.SH ")[0]
        missing = {o for o in options(command) if o not in section and o not in text.split(".SH COMMANDS")[0]}
        assert missing == set(), (command, missing)
    if shutil.which("groff"):
        result = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=page, capture_output=True, text=True)
        assert result.stderr == ""


def complete(*words):
    """What bash offers after these words, the last one being typed."""
    script = output("completions", "bash") + f"""
COMP_WORDS=({' '.join(f"'{w}'" for w in words)}) COMP_CWORD={len(words) - 1}
_oscar; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_bash():
    assert set(complete("oscar", "")) == set(commands())
    assert complete("oscar", "se") == ["serve"]
    assert "oscar+" in complete("oscar", "serve", "--kv", "") and complete("oscar", "serve", "--kv", "kit") == ["kitty"]
    assert complete("oscar", "--log-level", "w") == ["warning"]
    assert complete("oscar", "serve", "--api-key-f") == ["--api-key-file"]
    assert complete("oscar", "demo", "--api") == []
    assert options("serve") <= set(complete("oscar", "serve", "--"))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell):
    text = output("completions", shell)
    for command in commands():
        assert command in text
    assert "api-key-file" in text and "turboquant" in text
    if shutil.which(shell):
        result = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
