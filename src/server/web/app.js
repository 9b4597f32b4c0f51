// The page of an oscar server: a chat and a picture of its cache. Text from the model or the user
// reaches the document through textContent alone, never as HTML. No request leaves this origin.
'use strict';

const $ = (id) => document.getElementById(id);

// An element with attributes (on* ones are listeners) and children; strings become text.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'class') node.className = value;
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// ---------------------------------------------------------------- the browser's storage

// Private windows and strict settings may refuse it; the page then forgets.
const store = {
  read(area, name) {
    try { return JSON.parse(area().getItem('oscar.' + name)); } catch { return null; }
  },
  write(area, name, value) {
    try { area().setItem('oscar.' + name, JSON.stringify(value)); } catch { /* forgotten */ }
  },
};
const local = () => window.localStorage;
const tab = () => window.sessionStorage;

// ---------------------------------------------------------------- talking to the server

let apiKey = store.read(tab, 'key') || '';

// Asks for the key as often as the server refuses it. Relative addresses, so that a proxy may serve the page under any path.
async function request(path, options = {}) {
  for (;;) {
    const sent = apiKey;
    const headers = {...options.headers};
    if (sent) headers.Authorization = 'Bearer ' + sent;
    const response = await fetch(path, {...options, headers, cache: 'no-store'});
    if (response.status !== 401) return response;
    await askForKey(sent);
  }
}

let keyAsked = null;  // one dialog, however many requests wait for it
function askForKey(refused) {
  if (apiKey !== refused) return Promise.resolve();  // answered meanwhile
  keyAsked ??= new Promise((resolve) => {
    const dialog = $('key-dialog');
    $('key-note').textContent = refused ? 'The server refused that key.' : '';
    $('key').value = '';
    if (!dialog.open) dialog.showModal();
    $('key').focus();
    $('key-form').onsubmit = (event) => {
      event.preventDefault();
      apiKey = $('key').value.trim();
      store.write(tab, 'key', apiKey);
      keyAsked = null;
      dialog.close();
      resolve();
    };
  });
  return keyAsked;
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Yields the JSON of each data frame of a server-sent event stream.
async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf('\n\n')) >= 0) {
        const frame = rest.slice(0, end);
        rest = rest.slice(end + 2);
        for (const line of frame.split('\n')) {
          if (!line.startsWith('data: ')) continue;  // ": ping" and its kin
          if (line === 'data: [DONE]') return;
          yield JSON.parse(line.slice(6));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---------------------------------------------------------------- the conversation

// {role, content, reasoning?, state?: 'stopped'|'length'|'failed', error?, meta?}
let messages = store.read(tab, 'messages') ?? [];
if (!Array.isArray(messages)) messages = [];
let settings = store.read(local, 'settings') || {};
let running = null;  // {abort, requestId, view, started}
const serverInfo = {model: '', page: {}, defaults: {}};

const number = new Intl.NumberFormat('en');
function bytesText(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (bytes >= 1024 && unit < 4) { bytes /= 1024; ++unit; }
  return `${unit === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

function say(text) { $('live').textContent = text; }
function notice(text) {
  $('notice').textContent = text || '';
  $('notice').hidden = !text;
}

// Models mark reasoning in the text itself where the server does not take it apart.
function splitReasoning(message) {
  if (message.reasoning) return {reasoning: message.reasoning, text: message.content, open: false};
  const text = message.content.trimStart();
  if (!text.startsWith('<think>')) return {reasoning: '', text: message.content, open: false};
  const end = text.indexOf('</think>');
  if (end < 0) return {reasoning: text.slice(7).trim(), text: '', open: true};
  return {reasoning: text.slice(7, end).trim(), text: text.slice(end + 8).trimStart(), open: false};
}

// The list item of one message and how to bring it up to date.
class MessageView {
  constructor(message) {
    this.message = message;
    this.item = make('li', {class: 'msg ' + message.role});
    this.item.append(make('div', {class: 'who'}, message.role === 'user' ? 'You' : serverInfo.model || 'Model'));
    this.body = make('div', {class: message.role === 'user' ? 'body' : 'body md'});
    this.foot = make('div', {class: 'foot'});
    this.item.append(this.body, this.foot);
    if (message.role === 'user') this.drawUser();
    else this.update();
  }

  drawUser() {
    const text = this.message.content;
    this.body.textContent = text;
    const long = text.length > 900;
    this.body.classList.toggle('long', long);
    this.foot.replaceChildren();
    if (long) {
      const more = make('button', {type: 'button', class: 'quiet small', 'aria-expanded': 'false'}, `Show all ${number.format(text.length)} characters`);
      more.addEventListener('click', () => {
        const open = this.body.classList.toggle('open');
        more.setAttribute('aria-expanded', open);
        more.textContent = open ? 'Show less' : `Show all ${number.format(text.length)} characters`;
      });
      this.foot.append(more);
    }
    this.foot.append(make('button', {type: 'button', class: 'quiet small edit', 'aria-label': 'Edit this message', onclick: () => this.edit()}, 'Edit'),
                     copyButton(() => text, 'Copy this message'));
  }

  edit() {
    if (running) return;
    const area = make('textarea', {'aria-label': 'Edit the message', rows: 5});
    area.value = this.message.content;
    const done = () => { this.body.hidden = this.foot.hidden = false; box.remove(); };
    const save = () => {
      const text = area.value.trim();
      if (!text) return;
      messages.length = messages.indexOf(this.message);
      drawAll();
      submit(text);
    };
    const box = make('div', {}, area, make('div', {class: 'edit-row'},
      make('button', {type: 'button', class: 'quiet', onclick: () => { done(); this.foot.querySelector('.edit').focus(); }}, 'Cancel'),
      make('button', {type: 'button', class: 'primary', onclick: save}, 'Send')));
    area.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { event.stopPropagation(); done(); this.foot.querySelector('.edit').focus(); }
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
    });
    this.body.hidden = this.foot.hidden = true;
    this.item.append(box);
    area.focus();
  }

  // While an answer grows this runs once a frame.
  update(live) {
    const {reasoning, text, open} = splitReasoning(this.message);
    if (reasoning || open) {
      if (!this.think) {
        this.inner = make('div', {class: 'inner', tabindex: 0});
        this.summary = make('summary');
        this.think = make('details', {class: 'think'}, this.summary, this.inner);
        this.body.before(this.think);
      }
      const thinking = live && !text;
      this.summary.textContent = thinking ? 'Reasoning…' : 'Reasoning';
      this.inner.textContent = reasoning;
    }
    if (live && !text && !reasoning) {
      this.wait ??= make('span', {class: 'waiting'}, 'Reading the prompt');
      if (!this.wait.isConnected) this.body.before(this.wait);
    } else if (this.wait) {
      this.wait.remove();
    }
    renderMarkdown(this.body, text);
    if (live) this.foot.replaceChildren();
    else this.drawFoot(text);
  }

  isReading() { return Boolean(this.wait?.isConnected); }

  reading(tokens) {
    if (this.wait) this.wait.textContent = `Reading the prompt: ${number.format(tokens)} tokens so far`;
  }

  drawFoot(text) {
    const m = this.message;
    this.foot.replaceChildren();
    if (m.error) this.foot.append(make('span', {class: 'fault'}, m.error));
    if (text) this.foot.append(copyButton(() => text, 'Copy this answer'));
    if (m === messages.at(-1)) {
      this.foot.append(make('button', {type: 'button', class: 'quiet small regenerate', 'aria-label': 'Answer again', onclick: regenerate}, 'Regenerate'));
    }
    const ended = {stopped: 'stopped', length: 'ended by the limit of tokens'}[m.state];
    const facts = [ended, m.meta].filter(Boolean).join(' · ');
    if (facts) this.foot.append(make('span', {class: 'meta'}, facts));
  }
}

let views = [];
function drawAll() {
  views = messages.map((message) => new MessageView(message));
  $('messages').replaceChildren(...views.map((view) => view.item));
  $('welcome').hidden = messages.length > 0;
}

function addMessage(message) {
  messages.push(message);
  const view = new MessageView(message);
  views.push(view);
  $('messages').append(view.item);
  $('welcome').hidden = true;
  return view;
}

function keep() { store.write(tab, 'messages', messages); }

// Follows the end of the conversation unless the reader has scrolled away from it.
const follow = {
  at: true,
  watch() {
    const area = $('scroll');
    area.addEventListener('scroll', () => { this.at = area.scrollHeight - area.scrollTop - area.clientHeight < 60; }, {passive: true});
  },
  go(force) {
    if (force) this.at = true;
    if (this.at) $('scroll').scrollTop = $('scroll').scrollHeight;
  },
};

function requestBody() {
  const body = {messages: [], stream: true, stream_options: {include_usage: true}};
  if (settings.system) body.messages.push({role: 'system', content: settings.system});
  for (const message of messages.slice(0, -1)) {
    if (message.role === 'user') {
      body.messages.push({role: 'user', content: message.content});
    } else {
      const out = {role: 'assistant', content: message.content};
      if (message.reasoning) out.reasoning_content = message.reasoning;
      body.messages.push(out);
    }
  }
  for (const name of ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty', 'max_tokens', 'seed']) {
    if (settings[name] !== undefined && settings[name] !== '') body[name] = Number(settings[name]);
  }
  if (settings.thinking) body.chat_template_kwargs = {enable_thinking: settings.thinking === 'on'};
  return body;
}

function submit(text) {
  addMessage({role: 'user', content: text});
  answer();
}

function regenerate() {
  if (running || messages.at(-1)?.role !== 'assistant') return;
  messages.pop();
  views.pop().item.remove();
  answer();
}

function setRunning(state) {
  running = state;
  $('send').hidden = Boolean(state);
  $('stop').hidden = !state;
  $('new-chat').disabled = Boolean(state);
}

async function answer() {
  notice('');
  const message = {role: 'assistant', content: '', reasoning: ''};
  const earlier = views.at(-1);
  const view = addMessage(message);
  for (const other of views) if (other !== view && other.message.role === 'assistant') other.update();  // "Regenerate" goes
  const requestId = 'page-' + Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, '0')).join('');
  const abort = new AbortController();
  const typed = document.activeElement === $('prompt') || document.activeElement === $('send');
  setRunning({abort, requestId, view, started: performance.now()});
  if (typed && document.activeElement !== $('prompt')) $('stop').focus();
  say('Answering');
  monitor.wake();
  view.update(true);
  earlier?.item.scrollIntoView({block: 'nearest'});
  follow.go(true);

  let first = 0, last = 0, usage = null, frame = 0;
  const draw = () => {
    frame = 0;
    view.update(true);
    follow.go();
  };
  try {
    const response = await request('v1/chat/completions', {
      method: 'POST', signal: abort.signal, body: JSON.stringify(requestBody()),
      headers: {'Content-Type': 'application/json', 'X-Request-Id': requestId},
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const chunk of frames(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const {content, reasoning_content: reasoning} = choice.delta;
      if (content || reasoning) {
        last = performance.now();
        first ||= last;
        if (content) message.content += content;
        if (reasoning) message.reasoning += reasoning;
        frame ||= requestAnimationFrame(draw);
      }
      if (choice.finish_reason === 'length') message.state = 'length';
    }
  } catch (error) {
    if (error.name === 'AbortError') message.state = 'stopped';
    else {
      message.state = 'failed';
      message.error = error instanceof TypeError ? 'The server cannot be reached.' : sentence(error.message);
    }
  }
  cancelAnimationFrame(frame);
  const facts = [];
  if (usage) {
    facts.push(`${number.format(usage.completion_tokens)} tokens`);
    if (last > first) facts.push(`${((usage.completion_tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s`);
    facts.push(`first after ${((first - running.started) / 1000).toFixed(2)} s`);
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    facts.push(`prompt ${number.format(usage.prompt_tokens)} tokens` + (cached ? `, ${number.format(cached)} from the cache` : ''));
  }
  message.meta = facts.join(' · ');
  const stopHadFocus = document.activeElement === $('stop');
  setRunning(null);
  view.update(false);
  follow.go();
  if (stopHadFocus || document.activeElement === document.body) $('prompt').focus();
  say(message.error || (message.state === 'stopped' ? 'Stopped. ' : '') + splitReasoning(message).text.slice(0, 4000));
  keep();
  monitor.wake();
}

function sentence(text) { return text.charAt(0).toUpperCase() + text.slice(1).replace(/[^.!?]$/, '$&.'); }

// ---------------------------------------------------------------- suggestions

// Sentences of Thoreau's Walden (1854), in the public domain, to hide a number among.
const WALDEN = ('I got up early and bathed in the pond; that was a religious exercise, and one of the best things which I did. ' +
  'As I sit at my window this summer afternoon, hawks are circling about my clearing. ' +
  'The morning wind forever blows, the poem of creation is uninterrupted; but few are the ears that hear it. ' +
  'Time is but the stream I go a-fishing in. I drink at it; but while I drink I see the sandy bottom and detect how shallow it is. ' +
  'Its thin current slides away, but eternity remains. I would drink deeper; fish in the sky, whose bottom is pebbly with stars. ' +
  'Every morning was a cheerful invitation to make my life of equal simplicity, and I may say innocence, with Nature herself. ' +
  'I love a broad margin to my life. Rather than love, than money, than fame, give me truth. The sun is but a morning star. ' +
  "A lake is the landscape's most beautiful and expressive feature. It is earth's eye; looking into which the beholder measures the depth of his own nature. " +
  'I went to the woods because I wished to live deliberately, to front only the essential facts of life. Our life is frittered away by detail. ' +
  'I have a great deal of company in my house; especially in the morning, when nobody calls. Heaven is under our feet as well as over our heads.')
  .split(/(?<=\.) /);

const pick = (list) => list[Math.floor(Math.random() * list.length)];
const digits = (n) => Array.from({length: n}, (_, i) => (i ? Math.floor(Math.random() * 10) : 1 + Math.floor(Math.random() * 9))).join('');

function hiddenNumber() {
  const name = pick(['wild', 'tall', 'frozen', 'red', 'quick', 'brave', 'hollow']) + '-' + pick(['castle', 'summit', 'pebble', 'wheel', 'cave', 'bird', 'harbor']);
  const lines = [];
  for (let size = 0; size < 14000; size += lines.at(-1).length + 1) lines.push(pick(WALDEN));
  lines.splice(Math.floor(lines.length * (0.2 + 0.5 * Math.random())), 0, `One of the special magic numbers for ${name} is: ${digits(7)}.`);
  return 'Some special magic numbers are hidden within the following text. Make sure to memorize them.\n' + lines.join(' ') +
    `\nWhat is the special magic number for ${name} mentioned in the provided text?`;
}

const HIDDEN_NUMBER = ['Find a hidden number', 'About 3,700 tokens of prose with one number in it', hiddenNumber];
const QUESTIONS = [
  ['Explain a KV cache', 'What it holds and why it grows', () => 'What is the KV cache of a transformer, and why does it grow with the context?'],
  ['Write a program', 'With a code block to copy', () => 'Write a C++ function that counts the set bits of a 64-bit word, and explain it in two sentences.'],
];

// The model's own prompts where it comes with some (a small model answers little else), else questions that any large one answers.
function drawSuggestions() {
  $('welcome-note').hidden = serverInfo.model !== 'demo';
  const own = serverInfo.prompts.slice(0, 3).map((prompt) => [prompt, '', () => prompt]);
  const list = [...(own.length || serverInfo.model === 'demo' ? own : QUESTIONS), HIDDEN_NUMBER];
  $('suggestions').replaceChildren(...list.map(([title, note, text]) => make('li', {},
    make('button', {type: 'button', onclick: () => { if (!running) submit(text()); }}, make('b', {}, title), make('span', {}, note)))));
}

// ---------------------------------------------------------------- theme

const theme = {
  cached: null,
  names: {system: 'as the system', light: 'light', dark: 'dark'},

  set(name) {
    this.name = this.names[name] ? name : 'system';
    if (this.name === 'system') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.name;
    $('theme').setAttribute('aria-label', `Theme: ${this.names[this.name]}`);
    $('theme').title = `Theme: ${this.names[this.name]}`;
    store.write(local, 'theme', this.name);
    this.cached = null;
    monitor.redraw();
  },

  next() {
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    // First to what differs from now, so that the first press is seen.
    const order = dark ? ['system', 'light', 'dark'] : ['system', 'dark', 'light'];
    this.set(order[(order.indexOf(this.name) + 1) % 3]);
    say(`Theme: ${this.names[this.name]}`);
  },

  // For canvases, which cannot read CSS variables: the colours of the legend as computed.
  colours() {
    if (!this.cached) {
      const of = (selector) => getComputedStyle(document.querySelector(selector)).backgroundColor;
      this.cached = {s: of('.legend .k-sink'), q: of('.legend .k-int2'), r: of('.legend .k-recent'), ghost: of('.legend .ghost'),
        ink: getComputedStyle(document.body).color};
    }
    return this.cached;
  },
};

// ---------------------------------------------------------------- wiring

function fitPrompt() {
  const area = $('prompt');
  area.style.height = 'auto';
  area.style.height = Math.min(area.scrollHeight, window.innerHeight * 0.4) + 'px';
  $('send').disabled = !area.value.trim();
}

function sendPrompt() {
  const text = $('prompt').value.trim();
  if (!text || running) return;
  if (!serverInfo.model) {
    notice('The server is not ready yet.');
    return;
  }
  $('prompt').value = '';
  fitPrompt();
  submit(text);
}

function fillSettings() {
  for (const field of $('settings').querySelectorAll('[name]')) field.value = settings[field.name] ?? '';
}

function showMonitor(on) {
  document.body.classList.toggle('no-monitor', !on);
  $('toggle-monitor').setAttribute('aria-expanded', on);
  store.write(local, 'monitor', on);
  if (on) monitor.redraw();
  follow.go();  // on a phone the panel takes the place of the conversation's end
}

function start() {
  theme.set(store.read(local, 'theme') || 'system');
  showMonitor(store.read(local, 'monitor') ?? window.innerWidth > 960);
  drawAll();
  fillSettings();
  fitPrompt();
  follow.watch();
  follow.go(true);

  $('composer').addEventListener('submit', (event) => { event.preventDefault(); sendPrompt(); });
  $('prompt').addEventListener('input', fitPrompt);
  $('prompt').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendPrompt();
  });
  $('stop').addEventListener('click', () => running?.abort.abort());
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && running && !document.querySelector('dialog[open]')) running.abort.abort();
  });
  $('new-chat').addEventListener('click', () => {
    messages = [];
    keep();
    drawAll();
    notice('');
    $('prompt').focus();
  });
  $('open-settings').addEventListener('click', () => { fillSettings(); $('settings').showModal(); });
  $('settings').addEventListener('input', (event) => {
    if (event.target.validity?.valid) settings[event.target.name] = event.target.value;
    store.write(local, 'settings', settings);
  });
  $('reset-settings').addEventListener('click', () => {
    settings = {};
    store.write(local, 'settings', settings);
    fillSettings();
  });
  $('key-dialog').addEventListener('cancel', (event) => event.preventDefault());  // nothing works without
  $('idle').addEventListener('toggle', () => monitor.wake());
  $('toggle-monitor').addEventListener('click', () => showMonitor(document.body.classList.contains('no-monitor')));
  $('theme').addEventListener('click', () => theme.next());
  $('copy-curl').replaceWith(copyButton(() => $('curl').textContent, 'Copy the command'));
  const themeChanged = () => { theme.cached = null; monitor.redraw(); };
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', themeChanged);
  window.addEventListener('resize', () => monitor.redraw());
  document.addEventListener('visibilitychange', () => { if (!document.hidden) monitor.wake(); });
  if (matchMedia('(hover: hover)').matches) $('prompt').focus();
  monitor.poll();
}

start();
