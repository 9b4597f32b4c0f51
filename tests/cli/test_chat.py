"""oscar chat in a terminal and at the end of a pipe."""
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest


class Terminal:
    """A real terminal around a command."""

    def __init__(self, *args):
        master, slave = pty.openpty()
        self.process = subprocess.Popen(args, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                                        env={**os.environ, "TERM": "xterm"})
        self.slave = slave  # open, so that its modes can be looked at when the program is gone
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
        self.send(line.encode() + b"\n")

    def send(self, data):
        """Writes as much as the terminal takes at a time, and reads what it shows meanwhile."""
        while data:
            readable, writable, _ = select.select([self.fd], [self.fd], [], 20)
            assert readable or writable, "the terminal is stuck"
            if readable:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            if writable:
                data = data[os.write(self.fd, data[:1024]):]

    def press(self, key):
        os.write(self.fd, {"Ctrl-C": b"\x03", "Ctrl-D": b"\x04", "Ctrl-Z": b"\x1a"}[key])

    def is_canonical(self):
        flags = termios.tcgetattr(self.slave)[3]
        assert bool(flags & termios.ICANON) == bool(flags & termios.ECHO)
        return bool(flags & termios.ICANON)


@pytest.fixture
def terminal(oscar):
    opened = Terminal(oscar.binary, "chat", "--temperature", "0", "--device", "cpu")
    opened.greeting = opened.wait_for("> ")
    yield opened
    opened.process.kill()
    opened.process.wait(20)
    os.close(opened.slave)
    os.close(opened.fd)


def sent_messages(terminal, path):
    terminal.type(f"/save {path}")
    terminal.wait_for(" messages to ")
    terminal.wait_for("> ")
    return [m["content"] for m in json.loads(path.read_text())["messages"] if m["role"] == "user"]


@pytest.mark.parametrize("before, after", [(b"", b""), (b"\x1b[200~", b"\x1b[201~")])
def test_long_lines_arrive_whole(oscar, tmp_path, before, after):
    terminal = Terminal(oscar.binary, "chat", "--temperature", "0", "--device", "cpu", "--max-tokens", "1")
    terminal.wait_for("> ")
    text = "x" * 5000 + " \u4f60\u597d " + "word " * 1000 + "END"
    terminal.send(before + text.encode() + after + b"\n")
    terminal.wait_for("[length]", 300)  # 6,000 tokens, some under sanitizers
    terminal.wait_for("> ")
    assert sent_messages(terminal, tmp_path / "talk.json") == [text]
    terminal.type("/exit")
    assert terminal.process.wait(timeout=20) == 0
    assert terminal.is_canonical()


def test_a_hundred_kilobytes_are_taken_quickly(terminal):
    begin = time.monotonic()
    terminal.send(b"/nonsense-" + b"x" * 100_000 + b"END\n")
    terminal.wait_for("END: unknown command")
    assert time.monotonic() - begin < 10


def test_a_paste_of_several_lines_is_one_message(terminal, tmp_path):
    terminal.send(b"\x1b[200~Repeat exactly:\rriver stone\r/lantern\x1b[201~ copper\n")
    terminal.wait_for("tokens cached")
    terminal.wait_for("> ")
    assert sent_messages(terminal, tmp_path / "talk.json") == ["Repeat exactly:\nriver stone\n/lantern copper"]


def test_a_line_is_edited(terminal):
    terminal.send("/na\u00efve".encode() + b"\x7f\x7f\x7f\x15/wrong word\x17\x15/xhelp\x1b[D\x1b[D\x1b[D\x1b[D\x7f\n")
    terminal.wait_for("/reset ")  # of the list of commands
    terminal.wait_for("> ")
    terminal.send(b"\x1b[A\n")
    terminal.wait_for("/reset ")


def test_lines_of_spaces_are_no_messages(terminal, tmp_path):
    terminal.type("   \t ")
    terminal.wait_for("> ")
    assert sent_messages(terminal, tmp_path / "talk.json") == []


def test_a_pasted_command_may_end_with_its_newline(terminal):
    terminal.send(b"\x1b[200~/help\r\x1b[201~\n")
    terminal.wait_for("/reset ")  # of the list of commands


DEADLY = ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGALRM"]


@pytest.mark.parametrize("number", [getattr(signal, name) for name in DEADLY], ids=DEADLY)
def test_the_terminal_is_given_back_to_a_signal(terminal, number):
    assert not terminal.is_canonical()
    terminal.process.send_signal(number)
    assert terminal.process.wait(timeout=20) == -number
    assert terminal.is_canonical()
    terminal.wait_for("\x1b[?2004l")


def test_the_terminal_is_given_back_while_stopped(oscar):
    # A shell that sets no modes itself.
    terminal = Terminal("sh", "-mc", f"{oscar.binary} chat --device cpu; stty -a; fg; stty -a; echo left")
    terminal.wait_for("> ")
    terminal.send(b"/st")
    terminal.wait_for("/st")
    terminal.press("Ctrl-Z")
    assert "-icanon" not in terminal.wait_for(" icanon")
    terminal.wait_for("/st")  # continued, and drawn again
    terminal.type("ats")
    terminal.wait_for("0 tokens cached")
    terminal.wait_for("> ")
    terminal.type("/exit")
    assert "-icanon" not in terminal.wait_for(" icanon")
    terminal.wait_for("left")
    assert terminal.process.wait(timeout=20) == 0


def test_an_ignored_signal_stays_ignored(oscar):
    terminal = Terminal("sh", "-c", f"trap '' HUP; exec {oscar.binary} chat --device cpu")
    terminal.wait_for("> ")
    terminal.process.send_signal(signal.SIGHUP)
    terminal.type("/stats")
    terminal.wait_for("0 tokens cached")
    terminal.wait_for("> ")
    terminal.type("/exit")
    assert terminal.process.wait(timeout=20) == 0


def test_a_stop_that_does_not_happen_leaves_the_editor_in_charge(terminal):
    # Nobody could continue the leader of a session, so the system does not stop it.
    terminal.send(b"/st")
    terminal.wait_for("/st")
    terminal.press("Ctrl-Z")
    terminal.wait_for("/st")  # drawn again
    assert not terminal.is_canonical()
    terminal.type("ats")
    terminal.wait_for("0 tokens cached")


def test_a_wider_terminal_shows_more_of_the_line(terminal):
    def resize(columns):
        fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    resize(20)
    terminal.send(b"a" + b"b" * 30)
    terminal.wait_for("b" * 16 + "\x1b[K")
    terminal.send(b"\x01")  # to the start of the line
    terminal.wait_for("a" + "b" * 16 + "\x1b[K")
    resize(60)
    terminal.wait_for("a" + "b" * 30 + "\x1b[K")


def test_chat_in_a_terminal(terminal, tmp_path, root):
    for prompt in json.loads((root / "models/demo/sample_prompts.json").read_text()):
        assert prompt in terminal.greeting
    terminal.type("Sort these numbers: 512 104 873 299 640")
    terminal.wait_for("104 299 512 640 873")
    terminal.wait_for("> ")
    terminal.type("/stats")
    assert "no 2-bit pages yet" in terminal.wait_for("> ")
    saved = tmp_path / "talk.json"
    terminal.type(f"/save {saved}")
    terminal.wait_for("> ")
    assert len(json.loads(saved.read_text())["messages"]) == 2
    terminal.type("/nonsense")
    assert "unknown command" in terminal.wait_for("> ")
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
    text = json.loads((root / "examples/needle.json").read_text())[0]["content"]
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
    assert "messages[0] must be an object" in run.stdout and "cannot open" in run.stdout
    run = oscar("chat", stdin="/stats\r\n/exit\r\nAdd these numbers: 2 3\r\n")
    assert "0 tokens cached" in run.stdout and "no command" not in run.stdout
    run = oscar("chat", stdin="/read\n/read /nonexistent\n/exit\n")
    assert "/read needs a file name\n/nonexistent: cannot open" in run.stdout


def test_deterministic_answers_are_those_of_a_fresh_reading(oscar, tmp_path):
    drawn = ("--kv", "naive", "--temperature", "1.5", "--seed", "5", "--max-tokens", "500")

    def talk(*extra):
        oscar("chat", *drawn, *extra, stdin=f"Write a long story about the sea.\nGo on.\n/save {tmp_path}/talk.json\n")
        *before, answer = json.loads((tmp_path / "talk.json").read_text())["messages"]
        (tmp_path / "before.json").write_text(json.dumps(before))
        fresh = oscar.json("generate", *drawn, "--messages", tmp_path / "before.json", "--json")
        return answer["content"] == fresh["text"]

    assert talk("--deterministic")
    assert not talk()  # what was drawn stays as it was computed


def test_a_full_cache_ends_the_line_first(oscar):
    run = oscar("chat", "--kv-memory", "512KiB", "--temperature", "0", stdin="Write a long story about the sea.\n")
    lines = run.stdout.splitlines()
    assert len(lines) > 1 and lines[-1].startswith("the KV cache budget of 512.0 KiB is too small for 65 tokens")
    assert "--prefill-cell" not in lines[-1]
