"""oscar chat in a terminal and at the end of a pipe."""
import fcntl
import json
import os
import pty
import select
import subprocess
import termios
import time

import pytest


class Terminal:
    """A real terminal around a command."""

    def __init__(self, *args):
        master, slave = pty.openpty()
        self.process = subprocess.Popen(args, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.fd = master
        self.seen = ""

    def wait_for(self, text, seconds=60):
        """Reads up to and including `text`; what follows stays for the next call."""
        deadline = time.time() + seconds
        while text not in self.seen:
            assert time.time() < deadline, f"no {text!r} in {self.seen[-2000:]!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, line):
        os.write(self.fd, line.encode() + b"\n")

    def press(self, key):
        os.write(self.fd, {"Ctrl-C": b"\x03", "Ctrl-D": b"\x04"}[key])


@pytest.fixture
def terminal(oscar):
    opened = Terminal(oscar.binary, "chat", "--temperature", "0", "--device", "cpu")
    opened.wait_for("> ")
    yield opened
    opened.process.kill()


def test_chat_in_a_terminal(terminal, tmp_path):
    terminal.type("Sort these numbers: 512 104 873 299 640")
    terminal.wait_for("104 299 512 640 873")
    terminal.wait_for("> ")
    terminal.type("/stats")
    assert "bits a number" in terminal.wait_for("> ")
    saved = tmp_path / "talk.json"
    terminal.type(f"/save {saved}")
    terminal.wait_for("> ")
    assert len(json.loads(saved.read_text())["messages"]) == 2
    terminal.type("/nonsense")
    assert "no command" in terminal.wait_for("> ")
    terminal.type("/reset")
    terminal.wait_for("> ")
    terminal.type(f"/load {saved}")
    assert "loaded 2 messages" in terminal.wait_for("> ")
    # A prompt without a natural end, stopped from the keyboard; the program stays.
    terminal.type("Repeat exactly: " + "river stone lantern copper " * 60)
    time.sleep(1.5)
    terminal.press("Ctrl-C")
    terminal.wait_for("> ")
    terminal.type("Add these numbers: 2 3")
    terminal.wait_for("> ")
    terminal.type("/exit")
    assert terminal.process.wait(timeout=20) == 0


def test_ctrl_d_leaves_after_a_stopped_answer(terminal):
    terminal.type("Write a long story about the sea.")  # the demo model goes on for thousands of tokens
    terminal.wait_for("married")
    terminal.press("Ctrl-C")
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    terminal.press("Ctrl-D")
    assert terminal.process.wait(timeout=20) == 0


def test_ctrl_c_stops_the_reading_of_a_long_message(terminal, root, tmp_path):
    text = json.loads((root / "examples/needle-14k.json").read_text())[0]["content"]
    (tmp_path / "long.txt").write_text(text)
    terminal.type(f"/read {tmp_path}/long.txt")
    time.sleep(0.5)
    terminal.press("Ctrl-C")
    terminal.wait_for("[stopped while reading")
    terminal.wait_for("> ")
    terminal.type("/stats")
    tokens = int(terminal.wait_for(" tokens cached").split()[-3])
    assert tokens < 12000  # it stopped midway
    terminal.wait_for("> ")
    terminal.type(f"/save {tmp_path}/talk.json")
    terminal.wait_for("saved 0 messages")  # the message went with its answer


def test_ctrl_c_at_a_half_typed_line_gives_a_fresh_one(terminal):
    os.write(terminal.fd, b"Add these")
    terminal.press("Ctrl-D")  # hands over what is typed so far
    time.sleep(0.3)
    terminal.press("Ctrl-C")
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("/stats")
    assert "0 tokens cached" in terminal.wait_for("> ")


def test_a_loaded_system_message_outlives_a_reset(oscar, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": messages}))
    oscar("chat", stdin=f"/load {tmp_path}/talk.json\n/reset\n/save {tmp_path}/after.json\n")
    assert json.loads((tmp_path / "after.json").read_text())["messages"] == messages[:1]


def test_chat_from_a_pipe(oscar, tmp_path):
    run = oscar("chat", stdin="Repeat exactly: river lantern copper stone\n/stats\n/exit\n")
    assert "river lantern copper stone" in run.stdout
    (tmp_path / "bad.json").write_text('{"messages": [1]}')
    run = oscar("chat", stdin=f"/load {tmp_path}/bad.json\n/load {tmp_path}/none\n/exit\n")
    assert "without role or content" in run.stdout and "cannot open" in run.stdout
    run = oscar("chat", stdin="/read\n/read /nonexistent\n/exit\n")
    assert "/read needs a file name\n/nonexistent: cannot open" in run.stdout
