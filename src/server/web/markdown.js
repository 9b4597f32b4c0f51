// Markdown as nodes of the document: text reaches it through textContent alone, never as HTML.
'use strict';

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
