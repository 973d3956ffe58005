"use strict";
// The page of view.py. Data are in the page, or in scripts beside it that call chunk(). Whatever comes from data becomes
// text by way of textContent, never HTML. A view is a function that returns an element; the address (#...) says which.

const { about, chunks: inside } = JSON.parse(document.getElementById("data").textContent);
const LIVE = document.documentElement.dataset.live === "yes";
const NONE = 2 ** 32 - 1,
  PAGE = 100;
const views = {},
  caches = {};

// Elements and figures

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat(9).filter(child => child != null && child !== false));
  return node;
}
const whole = value => Math.round(value).toLocaleString("en-US");
const fixed = (value, digits = 2) => value == null || Number.isNaN(value) ? "–" : value.toFixed(digits);
const percent = (value, digits = 1) => (100 * value).toFixed(digits) + "%";
const signed = value => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4);
const sum = values => values.reduce((a, b) => a + b, 0);

function meter(share, kind = "") {
  const bar = el("span", { class: `meter ${kind}` });
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return bar;
}

function table(heads, rows, kind = "") {
  return el("div", { class: "scroll" }, el("table", { class: kind },
    heads && el("thead", {}, el("tr", {}, heads.map(head => Array.isArray(head) ?
      el("th", { class: head[1], scope: "col" }, head[0]) : el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows)));
}
const cell = (content, kind) => el("td", { class: kind }, content);

// Data: packed arrays, and pieces that are loaded when they are needed

function bytesFrom(data) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(data); // newer browsers: several times as fast
  const text = atob(data), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

function unpack({ kind, data }) {
  const bytes = bytesFrom(data);
  if (kind === "u1") return bytes;
  if (kind === "u4") return new Uint32Array(bytes.buffer);
  if (kind === "f4") return new Float32Array(bytes.buffer);
  const words = new Uint16Array(bytes.buffer);
  if (kind === "u2") return words;
  const scale = Number(kind.slice(1)) / 65535, values = new Float32Array(words.length);
  for (let at = 0; at < words.length; at++) values[at] = words[at] * scale;
  return values;
}

const waiting = {};

function chunk(key, name, content) { // what a piece calls
  waiting[name]?.(key === about.key ? content : null);
}

function unpackAll(content) {
  return Object.fromEntries(Object.entries(content).map(([name, value]) => [name, value && value.kind ? unpack(
    value) : value
  ]));
}

function load(name) {
  return caches[name] ??= new Promise((resolve, reject) => {
    const fail = why => { delete caches[name];
      reject(new Error(why)); };
    if (inside[name]) return resolve(unpackAll(inside[name]));
    const script = el("script", { src: `${encodeURIComponent(about.folder)}/${name}.js` });
    waiting[name] = content => content ? resolve(unpackAll(content)) :
      fail(`the data beside this page are of another time than the page: ${again}`);
    script.addEventListener("error", () => fail(
      `${about.folder}/${name}.js is missing: keep the folder beside the page, or ${again}`));
    script.addEventListener("load", () => { delete waiting[name];
      script.remove(); });
    document.head.append(script);
  });
}
const again =
`make both again, python view.py ${about.run}${about.kind === "own" ? "" : ` --source ${about.option}`}`;

// Tokens as text. A token may be part of a character: its bytes are U+DC80 .. U+DCFF, and the character is shown where its
// last byte is. What would not be seen, or would move other text, is shown as a sign or a number.

const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡" };
const UNSEEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;
const HALF = /[\udc80-\udcff]/u, OTHER = /[\ud800-\udc7f\udd00-\udfff]/u; // with the u flag: only halves that stand alone

function visible(text) {
  return text.replace(UNSEEN, c => SIGNS[c] || (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) :
    `⟨${c.charCodeAt(0).toString(16)}⟩`)).replace(/[\ud800-\udfff]/gu, c => `⟨${c.charCodeAt(0).toString(16)}⟩`);
}

function bytesOf(text) {
  return [...text].flatMap(c => HALF.test(c) ? [c.charCodeAt(0) - 0xdc00] : [...new TextEncoder().encode(c)]);
}

function decoded(bytes) {
  try { return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(
    bytes)); } catch { return null; }
}

function tokenText(token) { return about.vocabulary[token] ?? "\ufffd"; }

function textsOf(tokens) { // what is shown for each, and whether it is out of the ordinary
  let pending = [];
  return Array.from(tokens, token => {
    const text = tokenText(token);
    if (token === about.end || !HALF.test(text) || OTHER.test(text)) {
      pending = [];
      return { text: visible(text), odd: token === about.end };
    }
    const own = bytesOf(text),
      found = decoded([...pending, ...own]);
    pending = found !== null ? [] : pending.length + own.length < 4 ? [...pending, ...own] : own;
    const hex = own.map(byte => byte.toString(16).padStart(2, "0")).join(" ");
    return found !== null ? { text: visible(found), odd: false } : { text: `⟨${hex}⟩`, odd: true };
  });
}

function tokenPiece(token) {
  const [{ text, odd }] = textsOf([token]);
  return el("span", { class: odd ? "piece odd" : "piece", dir: "auto" }, text);
}

function tokenSpans(tokens, strength, peak, scale) {
  return textsOf(tokens).map(({ text, odd }, at) => {
    const value = strength[at] || 0;
    const span = el("span", { class: `token${odd ? " odd" : ""}${at === peak ? " peak" : ""}` }, text);
    if (value) { span.style.setProperty("--t", Math.min(1, value / scale).toFixed(3));
      span.title = value.toFixed(2); }
    return span;
  });
}

// Features: a layer and an unfolded id; index i with sign + is id i, with sign - is id i + m

const nameOf = (layer, id) => `${layer}:${id % about.m}${id < about.m ? "+" : "-"}`;
const levelOf = id => about.lows.findLastIndex(low => low <= id % about.m);
const link = (layer, id, text) => el("a", { href: `#${nameOf(layer, id)}`, class: "mono" }, text || nameOf(layer,
id));

function parseName(text) {
  const found = /^\s*(\d{1,9}):(\d{1,9})([+-]?)\s*$/.exec(text);
  if (!found) return null;
  const [layer, index] = [Number(found[1]), Number(found[2])];
  return about.layers.includes(layer) && index < about.m ? { layer, id: index + (found[3] === "-" ? about.m : 0) } :
    null;
}

async function tableOf(layer) {
  const found = await load(`table-${layer}`);
  found.layer = layer;
  return found;
}

function rowOf(found, id) {
  let low = 0,
    high = found.ids.length;
  while (low < high) { const middle = (low + high) >> 1; if (found.ids[middle] < id) low = middle + 1;
    else high = middle; }
  return found.ids[low] === id ? low : -1;
}

const share = (found, name, row) => found[name]?.[row] ? (found[name][row] - 1) / 10000 : NaN;
const labelOf = (found, row) => found.label?.[row] ? about.labels[found.label[row] - 1] : "";
const controlOf = (found, row) => found.label?.[row] && about.control ?
  about.control[found.layer]?.[found.label[row] - 1] ?? NaN : NaN;

async function corpus() { return (await load("corpus")).tokens; }

let documents;
async function documentStarts() {
  const tokens = await corpus();
  if (!documents) {
    documents = [0];
    tokens.forEach((token, at) => { if (token === about.end && at) documents.push(at); });
    documents.push(tokens.length);
  }
  return documents;
}
const documentAt = at => documents.findLastIndex(start => start <= at);

// Where we are

function route(hash) {
  let text = hash.replace(/^#/, "");
  try { text = decodeURIComponent(text.split("?")[0]) + (text.includes("?") ?
      `?${text.split("?").slice(1).join("?")}` : ""); } catch { text = ""; }
  const [path, rest] = [text.split("?")[0], text.split("?").slice(1).join("?")], feature = parseName(path);
  if (feature) return ["feature", feature, "features"];
  const document = /^text(?:\/(\d{1,9}))?(?:@(\d{1,9}))?$/.exec(path);
  if (document) return ["text", { number: document[1] && Number(document[1]), at: document[2] === undefined ?
      undefined : Math.min(Number(document[2]), about.tokens - 1) }, "texts"];
  const name = ["overview", "features", "texts", "live"].includes(path) ? path : "overview";
  return [name, new URLSearchParams(rest), name];
}

let turn = 0;
async function show() {
  const own = ++turn,
    main = document.getElementById("main"),
    [name, given, tab] = route(location.hash),
    began = performance.now();
  document.querySelectorAll("nav a").forEach(a => { if (a.dataset.view === tab) a.setAttribute("aria-current",
      "page");
    else a.removeAttribute("aria-current"); });
  const late = setTimeout(() => { if (own === turn) main.setAttribute("aria-busy", "true"); }, 150);
  let content;
  try { content = await views[name](given); } catch (error) { content = el("div", { class: "problem",
      role: "alert" }, String(error.message || error)); }
  clearTimeout(late);
  if (own !== turn) return;
  main.removeAttribute("aria-busy");
  main.replaceChildren(content);
  if (name === "features") { document.getElementById("query").value = given.get("q") || "";
    choose(list.names.indexOf(list.last ?? "")); } else window.scrollTo(0, 0);
  document.title = name === "feature" ? `${nameOf(given.layer, given.id)} – ${about.title}` : about.title;
  main.dataset.shown = location.hash; // for tests: which address is on the screen, and how long it took
  main.dataset.took = (performance.now() - began).toFixed(1);
}

// Keys, search, light and dark

function typing(target) { return /^(input|select|textarea|button)$/i.test(target.tagName) && target.type !==
  "button"; }

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing(event.target)) { event.target.blur(); return; }
  if (typing(event.target)) return;
  const [name] = route(location.hash), step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1 } [event
    .key
  ];
  if (event.key === "/") { event.preventDefault();
    document.getElementById("query").focus();
    document.getElementById("query").select(); } else if (name === "features" && (event.key === "ArrowUp" || event
      .key === "ArrowDown")) { event.preventDefault();
    choose(list.at + step); } else if (name === "features" && event.key === "Enter" && list.names[list.at] &&
    event.target.tagName !== "A") location.hash = list.names[list.at];
  else if (name === "feature" && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    const next = list.names[list.names.indexOf(list.last) + step];
    if (next && list.names.includes(list.last)) location.hash = next;
  } else if (name === "feature" && event.key === "Escape") location.hash = list.back || "features";
  else if ((name === "text" || name === "live") && step && reader.step && document.getElementById(
    "document")) { event.preventDefault();
    reader.step(step); } else if (name === "text" && event.key === "Escape") location.hash = "texts";
});

document.getElementById("search").addEventListener("submit", event => {
  event.preventDefault();
  const query = document.getElementById("query").value.trim(),
    feature = parseName(query);
  document.getElementById("query").blur();
  const given = route(location.hash)[0] === "features" ? Object.fromEntries(route(location.hash)[1]) : {};
  location.hash = feature ? nameOf(feature.layer, feature.id) :
    `features?${new URLSearchParams({ ...given, q: query, n: PAGE })}`;
});

const THEMES = ["auto", "light", "dark"],
  theme = document.getElementById("theme");

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = name;
  try { localStorage.setItem("theme", name); } catch { /* a browser may keep nothing for files */ }
}
theme.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme.textContent) + 1) % 3]));
try { const kept = localStorage.getItem("theme"); if (THEMES.includes(kept)) setTheme(
  kept); } catch { /* as above */ }

document.getElementById("name").textContent = about.title;
document.getElementById("foot").textContent =
  `${about.checkpoint}, step ${whole(about.step)}, commit ${about.made.commit ?? "unknown"}, torch ${about.made.torch}. ` +
  `Written by python view.py ${about.run}${about.kind === "own" ? "" : ` --source ${about.option}`}.`;
window.addEventListener("hashchange", show);
document.addEventListener("DOMContentLoaded", show);