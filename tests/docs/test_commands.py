"""Runs the commands of the documents. Every ```sh block is executed as it stands, in order, in one folder a document, except
those that say what they need:

    sh background   started, waited for until it is ready, and stopped at the document's end
    sh fails        must fail, and the following ```text block must be in what it prints
    sh needs-model  the reader's own model, data or downloads
    sh needs-gpu, sh needs-root, sh needs-build, sh needs-time

An unknown word after sh is an error, and so is a document without a block that runs."""
import os
import pathlib
import re
import shlex
import signal
import subprocess
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("OSCAR_BIN", ROOT / "build/release/oscar")).resolve()
DOCUMENTS = ["getting-started", "serving", "calibrating", "evaluating", "troubleshooting"]
SKIPPED = {"needs-model", "needs-gpu", "needs-root", "needs-build", "needs-time"}
BLOCK = re.compile(r"^```(sh|text)(?: ([a-z-]+))?\n(.*?)^```$", re.M | re.S)


def blocks(name):
    return BLOCK.findall((ROOT / f"docs/{name}.md").read_text())


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/oscar").symlink_to(BINARY)
    for folder in ("models", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path),
           "OSCAR_DEMO_MODEL": str(ROOT / "models/demo")}
    return lambda text, start=subprocess.Popen: start(
        ["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document(name, shell):
    background, ran = [], 0
    found = blocks(name)
    try:
        for index, (kind, marker, text) in enumerate(found):
            if kind == "text" or marker in SKIPPED:
                continue
            assert marker in ("", "background", "fails"), f"unknown marker {marker}"
            ran += 1
            process = shell(text)
            if marker == "background":
                background.append(process)
                lines = []
                for line in process.stdout:
                    lines.append(line)
                    if "oscar: ready" in line:
                        break
                assert lines and "oscar: ready" in lines[-1], (text, lines)
                # The pipe must not fill up.
                threading.Thread(target=process.stdout.read, daemon=True).start()
                continue
            out, _ = process.communicate(timeout=900)
            if marker == "fails":
                assert process.returncode in (1, 2), (text, process.returncode, out)
                assert found[index + 1][0] == "text", f"what does it print? {text}"
                for line in found[index + 1][2].strip().splitlines():
                    assert line in out, (text, out)
            else:
                assert process.returncode == 0, (text, out)
                # curl is content with an answer of any kind; a response that is fine says "error": null.
                assert not re.search(r'"error"(?!\s*:\s*null)', out), (text, out)
    finally:
        for process in background:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    assert ran > 0


def test_every_option_in_skipped_blocks_exists():
    """What cannot run here is at least spelled as the program spells it."""
    helps = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for kind, _, text in BLOCK.findall(path.read_text()):
            if kind != "sh":
                continue
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if not words or words[0] != "oscar":
                    continue
                if words[1:2] == ["--config"]:  # an option of the program itself
                    del words[1:3]
                command = [w for w in words[1:3] if re.fullmatch(r"[a-z]+", w)]
                for depth in (command, command[:1]):
                    key = tuple(depth)
                    if key not in helps:
                        result = subprocess.run([BINARY, *depth, "--help"], capture_output=True, text=True)
                        helps[key] = result.stdout if result.returncode == 0 else None
                    if helps[key]:
                        break
                known = helps[key] or ""
                for option in (w.split("=")[0] for w in words if w.startswith("--")):
                    assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), f"{path.name}: oscar {' '.join(depth)} has no {option}"


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if not re.match(r"[a-z]+:", target):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_no_command_hides_in_an_unmarked_block():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", path.read_text(), re.M | re.S)
        for info, text in fences:
            if info.split(" ")[0] in ("sh", "text"):
                continue
            assert not re.search(r"^(oscar|curl|scripts/|build/)", text, re.M), f"{path.name}: mark this block sh: {text[:60]}"
