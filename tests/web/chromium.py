"""A headless Chromium driven over its own debugging pipe: no driver, no library beyond Python's."""
import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

BINARY = os.environ.get("OSCAR_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT = float(os.environ.get("OSCAR_CHROMIUM_TIMEOUT", "120"))

KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Browser:
    """One process, its profile in a temporary folder. Commands may come from one thread."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="oscar-chromium-")
        command_read, self._command = os.pipe()
        self._answers, answer_write = os.pipe()
        # The browser reads commands from 3 and writes answers to 4; first out of their way.
        low = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (command_read, answer_write)]
        self.process = subprocess.Popen(
            [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
             f"--user-data-dir={self.profile}", "--no-first-run", "--no-default-browser-check", "--disable-extensions",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
             "--force-color-profile=srgb", "about:blank"],
            preexec_fn=lambda: (os.dup2(low[0], 3), os.dup2(low[1], 4)), pass_fds=(3, 4),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in (command_read, answer_write, *low):
            os.close(fd)
        self._next = 0
        self._replies = {}
        self._arrived = threading.Condition()
        self._closed = False
        self.pages = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        rest = b""
        while True:
            data = os.read(self._answers, 1 << 16)
            if not data:
                break
            *messages, rest = (rest + data).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                with self._arrived:
                    if "id" in message:
                        self._replies[message["id"]] = message
                    elif message.get("sessionId") in self.pages:
                        self.pages[message["sessionId"]].handle(message["method"], message["params"])
                    self._arrived.notify_all()
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def send(self, method, session=None, **params):
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        with self._arrived:
            assert self._arrived.wait_for(lambda: number in self._replies or self._closed, TIMEOUT), f"no answer to {method}"
            assert number in self._replies, f"the browser ended (exit code {self.process.poll()})"
            reply = self._replies.pop(number)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def page(self, **options):
        return Page(self, **options)

    def close(self):
        try:
            self.send("Browser.close")
            self.process.wait(20)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(20)
        os.close(self._command)
        shutil.rmtree(self.profile, ignore_errors=True)


class Page:
    """A tab of a profile of its own. Remembers every request, console message and uncaught exception."""

    def __init__(self, browser, width=1280, height=800, scheme="light", scale=1):
        self.browser = browser
        self.requests, self.posts, self.errors = [], [], []
        context = browser.send("Target.createBrowserContext")["browserContextId"]
        target = browser.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(domain + ".enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        self.scheme(scheme)

    def handle(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            if "postData" in params["request"]:
                self.posts.append(json.loads(params["request"]["postData"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])

    def send(self, method, **params):
        return self.browser.send(method, session=self.session, **params)

    def scheme(self, name, reduced_motion=False):
        self.send("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"}])

    def go(self, url):
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol.startsWith('http')")

    def js(self, expression):
        reply = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, (expression, reply["exceptionDetails"])
        return reply["result"].get("value")

    def wait(self, expression, seconds=TIMEOUT):
        deadline = time.monotonic() + seconds
        while True:
            if self.js(f"Boolean({expression})"):
                return
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.js('document.body.innerText.slice(-1500)')}\n{self.errors}"
            time.sleep(0.05)

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")

    def visible(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false")

    def click(self, selector):
        """A real click in the middle of an element, which must be there to be hit."""
        x, y, hit = self.js(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: 'center'}});
            const box = node.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            return [x, y, node.contains(document.elementFromPoint(x, y))];
        }})()""")
        assert hit, f"{selector} is covered by something"
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        self.send("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        code, text = KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers,
                      **({"text": text} if text and kind == "keyDown" else {}))

    def screenshot(self, path):
        data = self.send("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as out:
            out.write(base64.b64decode(data))
