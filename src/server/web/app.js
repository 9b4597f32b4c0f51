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

// ---------------------------------------------------------------- Markdown, as nodes

const INLINE = new RegExp([
  '(`+)(?!`)(?:([^]*?[^`])\\1(?!`))?',              // 1,2  code; a run of ticks that nothing closes is one find, or its every part would be tried
  '\\*\\*([^\\s*](?:[^]*?[^\\s])?)\\*\\*',           // 3    strong
  '\\*([^\\s*](?:[^*]*?[^\\s*])?)\\*',               // 4    emphasis
  '~~([^~]+)~~',                                    // 5    struck
  '!?\\[([^\\]]+)\\]\\((\\S+?)(?:\\s+"[^"]*")?\\)',   // 6,7  link; images too, which are never loaded
  '(https?:\\/\\/[^\\s<>()\\]]+[^\\s<>()\\].,;:!?\'"])',  // 8   bare address
  '\\\\([\\\\`*_{}\\[\\]()#+\\-.!|~])',                // 9    escape
].join('|'));

function link(address, ...children) {
  // Anything but these could run code or leave the web.
  if (!/^(https?:|mailto:)/i.test(address)) return make('span', {}, ...children);
  return make('a', {href: address, target: '_blank', rel: 'noopener noreferrer'}, ...children);
}

function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const found = depth < 8 ? INLINE.exec(text) : null;
    if (!found) break;
    if (found.index > 0) nodes.push(text.slice(0, found.index));
    const [whole, ticks, code, strong, emphasis, struck, label, target, address, escaped] = found;
    if (ticks) nodes.push(code === undefined ? ticks : make('code', {}, code));
    else if (strong) nodes.push(make('strong', {}, ...inline(strong, depth + 1)));
    else if (emphasis) nodes.push(make('em', {}, ...inline(emphasis, depth + 1)));
    else if (struck) nodes.push(make('s', {}, ...inline(struck, depth + 1)));
    else if (label) nodes.push(link(target, ...inline(label, depth + 1)));
    else if (address) nodes.push(link(address, address));
    else nodes.push(escaped);
    text = text.slice(found.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Cuts text into blocks: [{kind, lines, ...}]. A block's source never changes once a later one has
// begun, so that while an answer grows only its last block is drawn again.
function blocksOf(text) {
  const lines = text.split('\n');
  const blocks = [];
  let i = 0;
  const isStart = (line) => /^ {0,3}(#{1,6}\s|>)/.test(line) || FENCE.test(line) || RULE.test(line) || ITEM.test(line);
  while (i < lines.length) {
    const line = lines[i];
    const from = i;
    const fence = FENCE.exec(line);
    if (!line.trim()) { ++i; continue; }
    if (fence) {
      const close = new RegExp(`^ {0,3}${fence[1][0] === '`' ? '`' : '~'}{${fence[1].length},}\\s*$`);
      for (++i; i < lines.length && !close.test(lines[i]);) ++i;
      blocks.push({kind: 'code', language: fence[2], lines: lines.slice(from + 1, i)});
      ++i;
    } else if (/^ {0,3}#{1,6}\s/.test(line)) {
      blocks.push({kind: 'heading', lines: [line.trim()]});
      ++i;
    } else if (RULE.test(line)) {
      blocks.push({kind: 'rule', lines: [line]});
      ++i;
    } else if (/^ {0,3}>/.test(line)) {
      while (i < lines.length && /^ {0,3}>/.test(lines[i])) ++i;
      blocks.push({kind: 'quote', lines: lines.slice(from, i).map((l) => l.replace(/^ {0,3}> ?/, ''))});
    } else if (ITEM.test(line)) {
      while (i < lines.length && (ITEM.test(lines[i]) || /^\s+\S/.test(lines[i]) ||
             (!lines[i].trim() && ITEM.test(lines[i + 1] || '')))) ++i;
      blocks.push({kind: 'list', lines: lines.slice(from, i)});
    } else if (line.includes('|') && TABLE_RULE.test(lines[i + 1] || '') && lines[i + 1].includes('-')) {
      while (i < lines.length && lines[i].includes('|')) ++i;
      blocks.push({kind: 'table', lines: lines.slice(from, i)});
    } else {
      for (++i; i < lines.length && lines[i].trim() && !isStart(lines[i]);) ++i;
      blocks.push({kind: 'text', lines: lines.slice(from, i)});
    }
  }
  return blocks;
}

function listNode(lines, depth = 0) {
  const ordered = /\d/.test(ITEM.exec(lines[0])[2]);
  const list = make(ordered ? 'ol' : 'ul');
  if (ordered) list.setAttribute('start', parseInt(ITEM.exec(lines[0])[2], 10));
  const indent = ITEM.exec(lines[0])[1].length;
  let item = null, nested = [];
  const close = () => {
    if (item && nested.length) item.append(depth < 6 ? listNode(nested, depth + 1) : nested.join('\n'));
    nested = [];
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) {
      close();
      item = make('li', {}, ...inline(found[3]));
      list.append(item);
    } else if (found || nested.length) {
      if (line.trim()) nested.push(line);
    } else if (line.trim()) {
      item.append(' ', ...inline(line.trim()));
    }
  }
  close();
  return list;
}

function tableNode(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => inline(cell.trim()));
  const row = (line, tag) => make('tr', {}, ...cells(line).map((nodes) => make(tag, {}, ...nodes)));
  return make('table', {}, make('thead', {}, row(lines[0], 'th')),
              make('tbody', {}, ...lines.slice(2).map((line) => row(line, 'td'))));
}

const WORDS = new Set(('as async await auto bool break case catch char class const constexpr continue def default delete do double elif else ' +
  'enum except export extends false False final finally float fn for from func function go if impl import in int interface is lambda let long ' +
  'match mut namespace new nil None not null or and override package pass private protected pub public raise return self Self short signed ' +
  'size_t static std string struct super switch template this throw trait true True try type typedef typename union unsigned use using var ' +
  'virtual void where while with yield SELECT FROM WHERE JOIN GROUP ORDER BY INSERT UPDATE DELETE echo fi then done local').split(' '));
const TOKEN = /(\/\/[^\n]*|#[^\n]*|\/\*[^]*?(?:\*\/|$)|--\s[^\n]*)|("(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?)|\b(\d[\w.]*)\b|([A-Za-z_]\w*)/g;

// A light hand: comments, strings, numbers and words common to most languages.
function coloured(code) {
  if (code.length > 40000) return [code];
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(TOKEN)) {
    const [whole, comment, string, number, word] = found;
    const kind = comment ? 'tc' : string ? 'ts' : number ? 'tn' : WORDS.has(word) ? 'tk' : '';
    if (!kind) continue;
    if (found.index > at) nodes.push(code.slice(at, found.index));
    nodes.push(make('span', {class: kind}, whole));
    at = found.index + whole.length;
  }
  nodes.push(code.slice(at));
  return nodes;
}

const MAX_QUOTES = 16;  // one in another; what is deeper keeps its marks

function blockNode(block, depth = 0) {
  const text = block.lines.join('\n');
  switch (block.kind) {
    case 'code':
      return make('div', {class: 'codebox'},
                  make('div', {class: 'bar'}, make('span', {}, block.language || 'text'), copyButton(() => text, 'Copy code')),
                  make('pre', {tabindex: 0}, make('code', {}, ...coloured(text))));
    case 'heading': {
      const [, marks, title] = /^(#{1,6})\s+(.*?)\s*#*$/.exec(text) || [null, '#', text];
      // The page has its own first and second levels.
      return make('h' + Math.min(marks.length + 2, 6), {}, ...inline(title || ''));
    }
    case 'rule': return make('hr');
    case 'quote':
      return make('blockquote', {}, ...(depth < MAX_QUOTES ? blocksOf(text).map((inner) => blockNode(inner, depth + 1)) : [text]));
    case 'list': return listNode(block.lines);
    case 'table': return tableNode(block.lines);
    default: return make('p', {}, ...inline(text));
  }
}

// Draws `text` into `root`, keeping the nodes of blocks that are as they were.
function renderMarkdown(root, text) {
  const drawn = root.drawn || (root.drawn = []);
  const blocks = blocksOf(text);
  blocks.forEach((block, i) => {
    const source = block.kind + (block.language || '') + '\n' + block.lines.join('\n');
    if (drawn[i] && drawn[i].source === source) return;
    const node = blockNode(block);
    if (drawn[i]) drawn[i].node.replaceWith(node);
    else root.append(node);
    drawn[i] = {source, node};
  });
  for (const extra of drawn.splice(blocks.length)) extra.node.remove();
}

function copyButton(text, label) {
  const button = make('button', {type: 'button', class: 'quiet small', 'aria-label': label}, 'Copy');
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = 'Copied';
    } catch {
      button.textContent = 'Not allowed';  // plain HTTP on another host has no clipboard
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 1400);
  });
  return button;
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

// ---------------------------------------------------------------- the cache monitor

const KINDS = {s: 'sink', q: 'history', r: 'recent'};
const SHOWN = 5;  // sequences drawn at most, of those running and of those idle; the rest is counted
const EASE = 0.28;  // of the way to its height that a page goes in a frame

// One sequence as bars, one per page: height is bytes, so a sealed page is as small on the screen as it is in memory.
class PageStrip {
  constructor() {
    this.title = make('b');
    this.facts = make('span');
    this.canvas = make('canvas', {role: 'img'});
    this.node = make('section', {class: 'seq'}, make('header', {}, this.title, this.facts), this.canvas);
    this.heights = [];
    this.pages = '';
    this.canvas.addEventListener('pointermove', (event) => this.point(event));
    this.canvas.addEventListener('pointerleave', () => { $('tip').hidden = true; });
  }

  show(sequence, title, live) {
    this.sequence = sequence;
    this.pages = sequence.pages;
    this.title.textContent = title;
    this.node.classList.toggle('live', live);
    this.facts.textContent = `${number.format(sequence.tokens)} tokens, ${bytesText(sequence.bytes)}`;
    const count = {s: 0, q: 0, r: 0};
    for (const page of sequence.pages.toLowerCase()) ++count[page];
    Object.assign(this.canvas.dataset, {sink: count.s, history: count.q, recent: count.r, shared: sequence.shared_pages});
    this.canvas.setAttribute('aria-label', `${title}: ${sequence.pages.length} pages: ${count.s} sink, ${count.q} quantised, ` +
      `${count.r} recent; ${sequence.shared_pages} shared; ${sequence.bits_per_element.toFixed(2)} bits per number`);
    this.animate();
  }

  layout() {
    const width = this.canvas.clientWidth || 320;
    const n = Math.max(this.pages.length, 1);
    const [pitch, tall] = n > 1536 ? [3, 16] : n > 512 ? [4, 24] : [6, 40];
    const columns = Math.max(Math.floor(width / pitch), 1);
    const row = tall + 9;
    return {width, pitch, tall, columns, row, rows: Math.ceil(n / columns)};
  }

  target(kind, tall) {
    const {open = 1, sealed = 1} = serverInfo.page;
    return kind === 'q' || kind === 'Q' ? Math.max(tall * sealed / open, 2) : tall;
  }

  animate() {
    const still = matchMedia('(prefers-reduced-motion: reduce)').matches || document.hidden;
    const {tall} = this.layout();
    let moving = false;
    for (let i = 0; i < this.pages.length; ++i) {
      const goal = this.target(this.pages[i], tall) / tall;
      const from = this.heights[i] ?? (still ? goal : 0);
      const next = still || Math.abs(goal - from) < 0.01 ? goal : from + (goal - from) * EASE;
      this.heights[i] = next;
      moving ||= next !== goal;
    }
    this.heights.length = this.pages.length;
    this.draw();
    if (moving) this.frame ??= requestAnimationFrame(() => { this.frame = null; this.animate(); });
  }

  draw() {
    const {width, pitch, tall, columns, row, rows} = this.layout();
    const scale = window.devicePixelRatio || 1;
    const height = rows * row;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = height + 'px';
    }
    const context = this.canvas.getContext('2d');
    const colours = theme.colours();
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const gap = pitch > 3 ? 1 : 0.5;
    for (let i = 0; i < this.pages.length; ++i) {
      const x = (i % columns) * pitch, top = Math.floor(i / columns) * row;
      const kind = this.pages[i].toLowerCase();
      const tallNow = this.heights[i] * tall;
      context.fillStyle = colours.ghost;
      context.fillRect(x, top, pitch - gap, tall - tallNow);
      context.fillStyle = colours[kind];
      context.fillRect(x, top + tall - tallNow, pitch - gap, tallNow);
      if (kind !== this.pages[i]) {
        context.fillStyle = colours.ink;
        context.fillRect(x, top + tall + 2, pitch - gap, 1.5);
      }
    }
  }

  point(event) {
    const {pitch, columns, row} = this.layout();
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / pitch);
    const page = Math.floor((event.clientY - box.top) / row) * columns + column;
    const tip = $('tip');
    tip.hidden = column >= columns || !(page >= 0 && page < this.pages.length);
    if (tip.hidden) return;
    const letter = this.pages[page], kind = letter.toLowerCase();
    const size = kind === 'q' ? serverInfo.page.sealed : serverInfo.page.open;
    tip.textContent = `page ${page}: tokens ${page * 64}–${page * 64 + 63}, ${KINDS[kind]}, ${bytesText(size || 0)}${letter !== kind ? ', shared' : ''}`;
    tip.style.left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = event.clientY + 14 + 'px';
  }
}

// Sum of the samples of a metric in Prometheus text.
function metric(text, name) {
  let sum = 0;
  for (const line of text.split('\n')) {
    if (line.startsWith(name) && (line[name.length] === ' ' || line[name.length] === '{')) sum += Number(line.slice(line.lastIndexOf(' ')));
  }
  return sum;
}

const monitor = {
  strips: [], idleStrips: [], timer: 0, busy: false, before: null, rates: [],

  wake() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), 0);
  },

  async poll() {
    if (this.busy) return;
    this.busy = true;
    let active = Boolean(running);
    try {
      if (!serverInfo.model) await loadProperties();
      if (serverInfo.model && !document.hidden) {
        const [cache, metrics] = await Promise.all([request('v1/oscar/cache'), request('metrics')]);
        if (!cache.ok) throw new Error(await errorOf(cache));
        const snapshot = await cache.json();
        active ||= snapshot.running > 0;
        this.show(snapshot);
        if (metrics.ok) this.showMetrics(await metrics.text());
        setState('ready');
      }
    } catch {
      setState('down');
      serverInfo.model = '';  // it may come back as another
    }
    this.busy = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), active ? 350 : serverInfo.model ? 2000 : 700);
  },

  // The answer being made, else any running sequence, else what was used last.
  main(sequences) {
    const mine = running && sequences.find((s) => s.id.includes(running.requestId));
    return mine || sequences.find((s) => s.running) || sequences.find((s) => s.tokens > 0) || null;
  },

  show(snapshot) {
    const sequences = snapshot.sequences.filter((s) => s.tokens > 0);
    const main = this.main(sequences);
    if (main && running && main.id.includes(running.requestId)) running.view.reading(main.tokens);
    const ordered = main ? [main, ...sequences.filter((s) => s !== main)] : [];
    // Idle ones behind the first are folded away: they say little, and there may be many.
    const isIdle = (s) => s !== main && !s.running && !s.id;
    const busy = ordered.filter((s) => !isIdle(s)), idle = ordered.filter(isIdle);
    this.draw(this.strips, $('sequences'), busy.slice(0, SHOWN));
    const folded = $('idle');
    folded.hidden = idle.length === 0;
    folded.querySelector('summary').textContent =
      `Cached (idle): ${idle.length} more, ${bytesText(idle.reduce((sum, s) => sum + s.bytes, 0))}`;
    this.draw(this.idleStrips, folded.querySelector('div'), folded.open ? idle.slice(0, SHOWN) : []);
    const left = Math.max(busy.length - SHOWN, 0) + (folded.open ? Math.max(idle.length - SHOWN, 0) : 0);
    $('empty-cache').hidden = busy.length > 0 && left === 0;
    $('empty-cache').textContent = left > 0 ? `and ${left} more` : 'Pages appear as soon as something is asked.';
    this.headline(main);
    $('used').textContent = bytesText(snapshot.used_bytes);
    $('budget').textContent = bytesText(snapshot.budget_bytes);
    $('budget-meter').value = snapshot.budget_bytes ? snapshot.used_bytes / snapshot.budget_bytes : 0;
    $('running').textContent = snapshot.running;
    $('waiting').textContent = snapshot.waiting;
  },

  draw(strips, parent, sequences) {
    while (strips.length > sequences.length) strips.pop().node.remove();
    while (strips.length < sequences.length) {
      const strip = new PageStrip();
      strips.push(strip);
      parent.append(strip.node);
    }
    sequences.forEach((sequence, i) => {
      const mine = running && sequence.id.includes(running.requestId);
      const title = mine ? 'This answer' : sequence.running ? 'Another request' : sequence.id ? 'Waiting' : 'Cached (idle)';
      strips[i].show(sequence, title, sequence.running);
    });
  },

  // Where nothing is in two bits yet, what is stored says nothing of the method: then the bits at 128K tokens are shown. Sizes count whole
  // pages, as the memory that they take does.
  headline(main) {
    const {open = 0, sealed = 0} = serverInfo.page;
    const count = {s: 0, q: 0, r: 0};
    for (const page of main ? main.pages.toLowerCase() : '') ++count[page];
    const projected = count.q === 0 && serverInfo.method !== 'bf16' && serverInfo.longBits > 0;
    const reading = Boolean(main && running && main.id.includes(running.requestId) && running.view.isReading());
    $('projection').hidden = !projected && !reading;
    const now = reading ? 'Newest tokens of a prompt are in BF16, sealed after reading.' :
      main ? 'No 2-bit pages yet: the first and the newest tokens stay in BF16.' : 'The BF16 windows are counted.';
    $('projection').textContent = projected ? `At 128K tokens. ${now}` : now;
    const bits = projected ? serverInfo.longBits : main ? main.bits_per_element : 0;
    $('bits').textContent = bits > 0 ? bits.toFixed(2) : '–';
    $('ratio').textContent = bits > 0 ? (16 / bits).toFixed(1) + '×' : '–';
    const whole = (count.s + count.q + count.r) * open;
    const share = (bytes) => (whole ? 100 * bytes / whole : 0);
    const widths = [share(count.s * open), share(count.q * sealed), share(count.r * open)];
    document.querySelectorAll('#bar .seg').forEach((segment, i) => { segment.style.width = widths[i] + '%'; });
    $('bytes').textContent = main ? bytesText(main.bytes) : 'nothing cached yet';
    $('bytes-bf16').textContent = main ? `BF16: ${bytesText(whole)}` : '';
    $('bar').setAttribute('aria-label', main ? `${bytesText(main.bytes)} stored where BF16 takes ${bytesText(whole)}` : 'Nothing is cached yet');
  },

  showMetrics(text) {
    const now = performance.now(), generated = metric(text, 'oscar_generation_tokens_total');
    if (this.before && generated >= this.before.generated) {
      const rate = (generated - this.before.generated) / (now - this.before.now) * 1000;
      this.rates.push(rate);
      if (this.rates.length > 80) this.rates.shift();
      const recent = this.rates.slice(-3);
      $('rate').textContent = (recent.reduce((a, b) => a + b, 0) / recent.length).toFixed(rate > 0 && rate < 10 ? 1 : 0);
      this.spark();
    }
    this.before = {now, generated};
    $('hit-tokens').textContent = number.format(metric(text, 'oscar_cached_prompt_tokens_total'));
    $('prompt-tokens').textContent = number.format(metric(text, 'oscar_prompt_tokens_total'));
    $('hits').textContent = number.format(metric(text, 'oscar_prefix_cache_hits_total'));
    $('queries').textContent = number.format(metric(text, 'oscar_prefix_cache_queries_total'));
  },

  spark() {
    const canvas = $('spark'), scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = 28;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext('2d'), colours = theme.colours();
    context.scale(scale, scale);
    const top = Math.max(...this.rates, 1), step = width / 80;
    context.fillStyle = colours.q;
    this.rates.forEach((rate, i) => {
      const tall = rate / top * (height - 1);
      context.fillRect(width - (this.rates.length - i) * step, height - tall, Math.max(step - 1, 1), tall);
    });
  },

  redraw() {
    for (const strip of [...this.strips, ...this.idleStrips]) strip.draw();
    this.spark();
  },
};

function setState(state) {
  $('state').dataset.state = state;
  if (state === 'down') $('model-name').textContent = 'not reachable';
}

async function loadProperties() {
  const health = await fetch('health', {cache: 'no-store'});
  if (!health.ok) {
    setState('wait');
    $('model-name').textContent = await errorOf(health);
    return;
  }
  const response = await request('props');
  if (!response.ok) throw new Error(await errorOf(response));
  const props = await response.json();
  const cache = props.cache || {};
  serverInfo.model = props.model;
  serverInfo.method = cache.method;
  serverInfo.page = {open: cache.open_page_bytes, sealed: cache.sealed_page_bytes};
  serverInfo.longBits = cache.bits_per_element_at_128k || 0;
  serverInfo.defaults = props.default_generation_settings || {};
  serverInfo.prompts = Array.isArray(props.sample_prompts) ? props.sample_prompts.filter((p) => typeof p === 'string' && p) : [];
  $('model-name').textContent = `${props.model}, ${number.format(props.max_model_len)} tokens of context`;
  $('method').textContent = cache.description || '';
  $('history-name').textContent = {bf16: 'BF16', 'saw-int4': 'INT4'}[cache.method] || 'INT2';
  $('base-url').textContent = new URL('v1', location.href).href;
  $('curl').textContent = `curl ${new URL('v1/chat/completions', location.href).href} \\\n  -H 'Content-Type: application/json'${apiKey ? " \\\n  -H 'Authorization: Bearer KEY'" : ''} \\\n` +
    `  -d '{"messages": [{"role": "user", "content": "Hello"}]}'`;
  for (const [name, value] of Object.entries(serverInfo.defaults)) {
    const field = $('settings').querySelector(`[name="${name}"]`);
    if (field) field.placeholder = String(Math.round(value * 1000) / 1000);
  }
  drawSuggestions();
}

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
