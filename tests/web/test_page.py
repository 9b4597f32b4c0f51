"""The page at / in a real browser, on the real server and the demo model."""
import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import chromium  # noqa: E402
from conftest import Server, wait_until  # noqa: E402

pytestmark = pytest.mark.skipif(not chromium.BINARY, reason="chromium is not installed (scripts/setup.sh --dev brings it)")

WORDS = "button early ribbon faint flower old cold bright rapid coin mighty red gate calm simple silent keen whistle lion tower"
COPY = "Repeat exactly: " + " ".join(WORDS.split() * 12)
LONG = "Repeat exactly: " + " ".join(WORDS.split() * 40)  # about 800 tokens
SUM = "Add these numbers: 170 710 302 122 813"
ANSWERED = "document.querySelector('.regenerate')"


@pytest.fixture(scope="module")
def browser():
    running = chromium.Browser()
    yield running
    running.close()


@pytest.fixture(scope="module")
def server():
    # Cells of one page, so that a short prompt already has sealed pages.
    running = Server("--prefill-cell", 64, "--max-model-len", 4096).ready()
    yield running
    running.stop()


@pytest.fixture
def page(browser, server):
    """A fresh tab on the page. Afterwards: nothing was loaded from elsewhere, and no error was reported."""
    tab = browser.page()
    tab.go(server.url + "/")
    tab.wait("document.querySelectorAll('#suggestions button').length > 0")
    yield tab
    assert [url for url in tab.requests if not url.startswith((server.url, "data:"))] == []
    assert tab.errors == []


def ask(page, text):
    page.click("#prompt")
    page.type(text)
    page.press("Enter")


def answer_of(page):
    return page.js("[...document.querySelectorAll('.msg.assistant .body')].at(-1).innerText")


def test_typing_streams_an_answer(page):
    # Every state of the text that was drawn, seen from inside.
    page.js("""window.seen = new Set();
        new MutationObserver(() => seen.add(document.querySelector('.inner')?.textContent.length)).observe(
            document.getElementById('messages'), {childList: true, subtree: true, characterData: true})""")
    ask(page, SUM)
    page.wait("!document.getElementById('stop').hidden")
    assert not page.visible("#send") and not page.visible("#welcome")
    page.wait(ANSWERED)
    assert page.js("seen.size") > 5, "the answer came in one piece"
    assert answer_of(page) == "2117"
    assert page.text(".msg.user .body") == SUM
    assert page.js("document.activeElement.id") == "prompt"  # typing never lost the focus
    # Reasoning is there, folded.
    assert "170 + 710 = 880" in page.text("details.think .inner")
    assert not page.visible("details.think .inner")
    page.click("details.think summary")
    assert page.visible("details.think .inner")
    assert "tokens/s" in page.text(".msg.assistant .meta")
    assert page.visible("#send") and not page.visible("#stop")
    # Screen readers hear the whole answer once.
    assert page.text("#live") == "2117"


def test_stop_ends_the_request_on_the_server(page, server):
    before = server.metrics()["oscar_engine_cancelled_total"]
    ask(page, COPY)
    page.wait("document.querySelector('.msg.assistant .body').innerText.length > 10")
    page.click("#stop")
    page.wait(ANSWERED)
    assert "stopped" in page.text(".msg.assistant .meta")
    assert 10 < len(answer_of(page)) < len(COPY) - 40
    assert wait_until(lambda: server.metrics()["oscar_engine_cancelled_total"] == before + 1)
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0)
    # So does the Escape key; the stopped part stays.
    page.click(".regenerate")
    page.wait("document.querySelector('.msg.assistant .body').innerText.length > 10")
    page.press("Escape")
    page.wait(ANSWERED)
    assert "stopped" in page.text(".msg.assistant .meta")


def test_turns_settings_edit_and_regenerate(page):
    page.click("#open-settings")
    page.wait("document.getElementById('settings').open")
    for name, value in {"system": "Be exact.", "temperature": "0", "max_tokens": "20", "seed": "7"}.items():
        page.js(f"document.querySelector('#settings [name={name}]').focus()")
        page.type(value)
    page.press("Escape")
    page.wait("!document.getElementById('settings').open")
    ask(page, "Sort these numbers: 599 972 169")
    page.wait(ANSWERED)
    first = answer_of(page)
    ask(page, "Sort these numbers: 205 209 102")
    page.wait("document.querySelectorAll('.msg').length === 4 && " + ANSWERED)
    body = page.posts[-1]
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][0]["content"] == "Be exact." and body["messages"][2]["content"] == first
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 20, 7)
    assert "top_p" not in body  # left to the model
    # The same again: one message is replaced, and only the last can be.
    second = answer_of(page)
    page.click(".regenerate")
    page.wait("!document.getElementById('stop').hidden")
    page.wait(ANSWERED)
    assert answer_of(page) == second and page.js("document.querySelectorAll('.msg').length") == 4
    assert page.posts[-1]["messages"] == body["messages"]
    # Editing the first message drops what followed.
    page.click(".msg.user .edit")
    page.js("document.querySelector('.msg.user textarea').select()")
    page.type("Sort these numbers: 9 8 7")
    page.press("Enter")
    page.wait("document.querySelectorAll('.msg').length === 2 && " + ANSWERED)
    assert [m["content"] for m in page.posts[-1]["messages"]] == ["Be exact.", "Sort these numbers: 9 8 7"]
    # A reload keeps the conversation; "New chat" does not.
    page.send("Page.reload")
    page.wait("document.readyState === 'complete' && document.querySelectorAll('.msg').length === 2")
    page.click("#new-chat")
    page.wait("document.querySelectorAll('.msg').length === 0")
    assert page.visible("#welcome")


def test_monitor_shows_the_cache_as_it_is(page, server):
    page.wait("document.getElementById('budget').textContent === '256 MiB'")
    queries = int(page.text("#queries").replace(",", ""))
    page.js("settings = {max_tokens: 40}")
    ask(page, LONG)
    canvas = "document.querySelector('#sequences canvas').dataset"
    page.wait(f"{ANSWERED} && Number({canvas}.history) > 2")
    page.wait(f"document.getElementById('running').textContent === '0' && Number(document.getElementById('queries').textContent) > {queries}")
    # What is drawn first is what the server says of the sequence used last.
    cache = server.get("/v1/oscar/cache").json()
    drawn = page.js(f"({{...{canvas}}})")
    sequence = next(s for s in cache["sequences"] if s["tokens"] > 0)
    letters = sequence["pages"].lower()
    assert {k: int(v) for k, v in drawn.items()} == {
        "sink": letters.count("s"), "history": letters.count("q"), "recent": letters.count("r"), "shared": sequence["shared_pages"]}
    assert float(page.text("#bits")) == pytest.approx(sequence["bits_per_element"], abs=0.006)
    assert float(page.text("#ratio").rstrip("×")) == pytest.approx(16 / sequence["bits_per_element"], abs=0.06)
    # One size for one thing: the headline, the strip and the bar count the same whole pages.
    open_page = server.get("/props").json()["cache"]["open_page_bytes"]
    assert page.text("#bytes") == page.js(f"bytesText({sequence['bytes']})")
    assert page.text("#sequences header span").endswith(" " + page.text("#bytes"))
    assert page.text("#bytes-bf16") == page.js(f"'BF16: ' + bytesText({len(letters) * open_page})")
    widths = page.js("[...document.querySelectorAll('#bar .seg')].map((s) => parseFloat(s.style.width))")
    assert sum(widths) == pytest.approx(100 * sequence["bytes"] / (len(letters) * open_page), abs=0.5)
    label = page.js("document.querySelector('#sequences canvas').getAttribute('aria-label')")
    assert f"{letters.count('q')} quantised" in label
    # Pixels, not only numbers: a sealed page is lower than an open one, after the frames that it takes to shrink.
    page.js("new Promise((done) => { let left = 60; const next = () => left-- ? requestAnimationFrame(next) : done(); next(); })")
    heights = page.js("""(() => {
        const pixels = document.querySelector('#sequences canvas').getContext('2d').getImageData(0, 0, 12, 40).data;
        const tall = (page) => Array.from({length: 40}, (_, y) => pixels[(y * 12 + page * 6 + 2) * 4 + 3]).filter((a) => a > 200).length;
        return [tall(0), tall(1)];
    })()""")
    assert heights[0] == 40 and 4 <= heights[1] <= 7, heights
    # The next turn finds its prefix.
    hits = int(page.text("#hits"))
    ask(page, "Sort these numbers: 3 2 1")
    page.wait(f"document.querySelectorAll('.msg').length === 4 && {ANSWERED} && Number(document.getElementById('hits').textContent) > {hits}")
    assert "from the cache" in page.js("[...document.querySelectorAll('.msg.assistant .meta')].at(-1).textContent")


def test_before_two_bits_the_projection_is_shown(browser, start):
    server = start().ready()
    long_bits = server.get("/props").json()["cache"]["bits_per_element_at_128k"]
    assert 2.2 < long_bits < 2.4
    page = browser.page()
    page.go(server.url + "/")
    projected = f"document.getElementById('bits').textContent === '{long_bits:.2f}' && document.getElementById('ratio').textContent === '{16 / long_bits:.1f}×'"
    page.wait(projected)
    assert "At 128K tokens" in page.text("#projection") and page.text("#bytes") == "nothing cached yet"
    ask(page, SUM)
    page.wait(f"{ANSWERED} && document.getElementById('bytes').textContent !== 'nothing cached yet'")
    page.wait(projected)  # a short conversation is BF16 alone: 16.00 would say nothing of the method
    assert "No 2-bit pages yet" in page.text("#projection")
    # While a long prompt is read, its newest tokens are in BF16: said, not shown as a poor ratio.
    page.js("""window.said = new Set();
        new MutationObserver(() => said.add(document.getElementById('projection').textContent)).observe(
            document.getElementById('projection'), {childList: true, subtree: true, characterData: true})""")
    page.click("#new-chat")
    page.js("settings = {max_tokens: 8}")
    page.js("[...document.querySelectorAll('#suggestions button')].at(-1).click()")
    page.wait(ANSWERED)
    page.wait("!document.getElementById('projection').checkVisibility()")
    assert any("sealed after reading" in text for text in page.js("[...said]"))
    assert float(page.text("#bits")) < 8
    assert page.errors == []


def test_idle_sequences_are_folded(browser, start):
    server = start().ready()
    page = browser.page()
    page.go(server.url + "/")
    page.wait("document.querySelectorAll('#suggestions button').length > 0")
    for text in (SUM, "Sort these numbers: 599 972 169", "Sort these numbers: 5 9 1"):
        page.click("#new-chat")
        ask(page, text)
        page.wait(ANSWERED)
    page.wait("document.querySelector('#idle summary').textContent.startsWith('Cached (idle): 2 more, ')")
    assert page.visible("#idle summary")
    assert page.js("document.querySelectorAll('#sequences .seq').length") == 1
    assert page.text("#sequences .seq b") == "Cached (idle)"
    assert page.js("document.querySelectorAll('#idle .seq').length") == 0
    page.click("#idle summary")
    page.wait("document.querySelectorAll('#idle .seq canvas').length === 2")
    assert page.visible("#idle .seq")
    assert page.errors == []


def test_the_models_own_prompts_are_buttons(page):
    shipped = json.loads((pathlib.Path(__file__).resolve().parents[2] / "models/demo/sample_prompts.json").read_text())
    assert page.js("serverInfo.prompts") == shipped and len(shipped) == 3
    assert page.js("[...document.querySelectorAll('#suggestions b')].map((b) => b.textContent)")[:3] == shipped
    page.js(f"serverInfo.prompts = {json.dumps([SUM, '<b>two</b>', 'three', 'four'])}; drawSuggestions()")
    assert page.js("[...document.querySelectorAll('#suggestions b')].map((b) => b.textContent)")[:3] == [SUM, "<b>two</b>", "three"]
    assert page.js("document.querySelectorAll('#suggestions button').length") == 4  # three and the hidden number
    page.click("#suggestions button")
    page.wait(ANSWERED)
    assert page.text(".msg.user .body") == SUM and answer_of(page) == "2117"


def test_words_of_the_field(page):
    page.click("#open-settings")
    page.wait("document.getElementById('settings').open")
    labels = page.js("[...document.querySelectorAll('#settings label')].map((l) => l.firstChild.textContent.trim())")
    assert {"Max tokens", "Reasoning", "Temperature"} <= set(labels)
    assert page.js("[...document.querySelectorAll('#settings option')].map((o) => o.textContent)") == ["Model default", "On", "Off"]
    page.press("Escape")
    ask(page, SUM)
    page.wait(ANSWERED)
    assert page.text("details.think summary") == "Reasoning"


def test_asks_for_the_key(browser, start):
    server = start("--api-key", "open-sesame-1").ready()
    page = browser.page()
    page.go(server.url + "/")
    page.wait("document.getElementById('key-dialog').open")
    assert page.js("document.activeElement.id") == "key"
    page.type("wrong")
    page.press("Enter")
    page.wait("document.getElementById('key-note').textContent.includes('refused')")
    page.type("open-sesame-1")
    page.press("Enter")
    page.wait("!document.getElementById('key-dialog').open && document.querySelectorAll('#suggestions button').length > 0")
    ask(page, SUM)
    page.wait(ANSWERED)
    assert answer_of(page) == "2117"
    # Not kept beyond the tab, never in an address; 401 is all that was complained of.
    assert "sesame" not in page.js("JSON.stringify(localStorage)")
    assert not any("sesame" in url for url in page.requests)
    assert all("401" in error for error in page.errors), page.errors


def test_errors_are_shown(page):
    page.js("settings = {max_tokens: 100000}")
    ask(page, "Hello")
    page.wait("document.querySelector('.msg .fault')")
    assert "4096" in page.text(".msg .fault")
    assert page.text("#live") == page.text(".msg .fault")
    page.errors = [error for error in page.errors if "400" not in error]  # the browser reports the status


def test_model_text_stays_text(page):
    hostile = "\n\n".join([
        "<img src=x onerror=alert(1)><script>alert(1)</script>", "[a](javascript:alert(1)) [b](data:text/html,x) [c](https://example.org/x)",
        "**bold *nested* text** `<b>code</b>`", "```html\n<script>alert(1)</script>\n```", "| a | <i>b</i> |\n|---|---|\n| 1 | 2 |",
        "- one\n  - two\n- three", "# <u>title</u>", "> <iframe src=//example.org></iframe>", "![x](https://example.org/x.png)"])
    page.js(f"addMessage({{role: 'assistant', content: {json.dumps(hostile)}}})")
    found = page.js("[...document.querySelectorAll('.msg.assistant .body *')].map((n) => n.localName)")
    assert set(found) <= {"p", "a", "span", "strong", "em", "code", "pre", "div", "button", "table", "thead", "tbody", "tr", "th", "td",
                          "ul", "li", "h3", "blockquote"}, found
    assert page.js("[...document.querySelectorAll('.msg.assistant .body a')].map((a) => a.href)") == ["https://example.org/x", "https://example.org/x.png"]
    assert page.js("document.querySelectorAll('.msg.assistant .body li li').length") == 1
    assert page.js("document.querySelector('.codebox code').textContent") == "<script>alert(1)</script>"
    # However an answer is cut into pieces, it ends as if it had come whole, and finished blocks are left alone.
    assert page.js(f"""(() => {{
        const text = {json.dumps(hostile)}, whole = document.createElement('div'), grown = document.createElement('div');
        renderMarkdown(whole, text);
        for (let n = 1; n <= text.length; ++n) renderMarkdown(grown, text.slice(0, n));
        const first = grown.firstChild;
        renderMarkdown(grown, text + ' more');
        return whole.outerHTML.length > 500 && first === grown.firstChild &&
            grown.textContent.startsWith(whole.textContent.slice(0, 200));
    }})()""")


def test_text_of_any_shape_is_drawn(page):
    # What a model that repeats itself may say: quotes in quotes without end, ticks that nothing closes.
    took = page.js("""(() => {
        const ticks = Array.from({length: 200}, (_, i) => '`'.repeat(i) + 'a').join(' ');
        const begin = performance.now();
        for (const text of ['>'.repeat(20000) + ' deep', ticks]) {
          const root = document.createElement('div');
          renderMarkdown(root, text);
          if (!root.textContent.endsWith(text.slice(-2))) throw new Error(root.textContent.slice(-20));
        }
        const root = document.createElement('div');
        renderMarkdown(root, 'a `` b `c` d');
        if (root.innerHTML !== '<p>a `` b <code>c</code> d</p>') throw new Error(root.innerHTML);
        return performance.now() - begin;
      })()""")
    assert took < 3000


def test_themes(page):
    light = page.js("getComputedStyle(document.body).backgroundColor")
    page.scheme("dark")
    dark = page.js("getComputedStyle(document.body).backgroundColor")
    assert light == "rgb(250, 249, 246)" and dark == "rgb(21, 22, 26)"
    page.click("#theme")  # from the system's dark to light
    assert page.js("getComputedStyle(document.body).backgroundColor") == light
    page.send("Page.reload")
    page.wait("document.readyState === 'complete' && document.documentElement.dataset.theme === 'light'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page, scheme):
    page.scheme(scheme)
    ratios = page.js("""(() => {
        const probe = document.createElement('i');
        document.body.append(probe);
        const rgb = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number); };
        const light = (c) => c.slice(0, 3).map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
        const ratio = (a, b) => { const [x, y] = [light(rgb(a)), light(rgb(b))].sort((p, q) => q - p); return (x + .05) / (y + .05); };
        const out = {};
        for (const ground of ['--paper', '--panel', '--raised', '--mine']) for (const ink of ['--ink', '--soft', '--accent', '--danger']) out[ink + ground] = ratio(ink, ground);
        out.button = ratio('--on-accent', '--accent');
        for (const mark of ['--sink', '--int2', '--recent']) out['mark' + mark] = ratio(mark, '--panel') * 1.5;  // graphics need 3, text 4.5
        return out;
    })()""")
    # Soft text on the user's own bubble is never used.
    poor = {k: round(v, 2) for k, v in ratios.items() if v < 4.5 and k not in ("--accent--mine", "--danger--mine", "--soft--mine")}
    assert poor == {}


def test_keyboard_and_screen_reader(page):
    roles = page.js("['header', 'nav', 'main', 'aside'].map((n) => document.querySelectorAll('body ' + n).length)")
    assert roles[1:] == [1, 1, 1] and roles[0] >= 1
    # Whatever can be operated has a name.
    page.send("Accessibility.enable")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    operable = [n for n in nodes if not n.get("ignored") and n["role"]["value"] in
                ("button", "textbox", "link", "combobox", "spinbutton", "checkbox", "meter", "img", "dialog")]
    assert len(operable) > 8
    assert [n for n in operable if not n.get("name", {}).get("value")] == []
    # The skip link comes first and leads to the message box.
    page.js("document.activeElement.blur()")
    page.press("Tab")
    assert page.js("document.activeElement.className") == "skip"
    page.press("Enter")
    assert page.wait("document.activeElement.id === 'prompt'") is None
    # From there everything is reached by Tab alone.
    reached = set()
    page.js("document.querySelector('.skip').focus()")
    for _ in range(25):
        page.press("Tab")
        reached.add(page.js("document.activeElement.id || document.activeElement.localName"))
    assert {"new-chat", "open-settings", "toggle-monitor", "theme", "prompt", "summary", "button"} <= reached


def test_narrow_screens_keep_everything_reachable(browser, server):
    page = browser.page(width=390, height=780)
    page.go(server.url + "/")
    page.wait("document.querySelectorAll('#suggestions button').length > 0")
    assert page.js("document.documentElement.scrollWidth <= window.innerWidth")
    assert not page.visible("#monitor")
    page.click("#toggle-monitor")
    assert page.visible("#monitor") and page.visible("#prompt")
    ask(page, SUM)
    page.wait(ANSWERED)
    # The answer is seen above the panel, nothing is cut off at the side, and fingers hit what they aim at.
    assert page.js("document.documentElement.scrollWidth <= window.innerWidth")
    box = page.js("(() => { const b = [...document.querySelectorAll('.msg.assistant .body')].at(-1).getBoundingClientRect(); return [b.top, b.bottom, b.right]; })()")
    composer = page.js("document.getElementById('composer').getBoundingClientRect().top")
    assert 0 < box[0] and box[1] <= composer and box[2] <= 390
    low = page.js("""[...document.querySelectorAll('.top button, .box button, #suggestions button')].filter((b) => b.checkVisibility())
        .filter((b) => b.getBoundingClientRect().height < 36).map((b) => b.id)""")
    assert low == []
    assert page.errors == []
