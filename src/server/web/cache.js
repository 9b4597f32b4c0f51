// The cache panel: one strip of bars per sequence, the headline and the figures below.
'use strict';

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
      `${count.r} recent; ${sequence.shared_pages} shared; ${sequence.bits_per_element.toFixed(2)} bits per element`);
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
