"use strict";
// The page of view.py: what all of its views share. Data are in the page, or in scripts beside it that call chunk().
// Whatever comes from data becomes text by way of textContent, never HTML.

const { about, chunks: inside } = JSON.parse(document.getElementById("data").textContent);
const LIVE = document.documentElement.dataset.live === "yes";
const COMMAND = about.command;
const NONE = 2 ** 32 - 1; // no position
const PAGE = 100; // rows of a table
const views = {}; // functions that return an element

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
const known = value => value != null && !Number.isNaN(value);
const fixed = (value, digits = 2) => known(value) ? value.toFixed(digits).replace("-", "−") : "–";
const percent = (value, digits = 1) => (100 * value).toFixed(digits) + "%";
const signed = value => (value < 0 ? "" : "+") + fixed(value, 4);
const millionths = value => known(value) ? whole(Math.max(0, 1e6 * value)) : "–"; // rounding may leave one below 0
const sum = values => values.reduce((a, b) => a + b, 0);

const soft = (...text) => el("p", { class: "soft small" }, text);
const problem = text => el("div", { class: "problem", role: "alert" }, text);
const button = (text, onclick, more = {}) => el("button", { type: "button", class: "quiet", onclick, ...more }, text);
const card = (value, text) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, text));
const cell = (content, kind) => el("td", { class: kind }, content);

function meter(share, kind = "") {
  const bar = el("span", { class: `meter ${kind}` });
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return bar;
}

function table(heads, rows, kind = "") { // heads: texts, or [text, class]
  const head = heads.map(name => [name].flat()).map(([name, kind]) => el("th", { class: kind, scope: "col" }, name));
  return el("div", { class: "scroll" }, el("table", { class: kind },
    heads.length > 0 && el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

// Data: packed arrays, and pieces that are loaded when they are needed

function bytesFrom(data) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(data); // newer browsers: twice as fast
  const text = atob(data), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

function unpack({ kind, data }) {
  const bytes = bytesFrom(data);
  if (kind === "u1") return bytes;
  if (kind === "u4") return new Uint32Array(bytes.buffer);
  if (kind === "f4") return new Float32Array(bytes.buffer);
  const short = new Uint16Array(bytes.buffer);
  if (kind === "u2") return short;
  const scale = Number(kind.slice(1)) / 65535, values = new Float32Array(short.length);
  for (let at = 0; at < short.length; at++) values[at] = short[at] * scale;
  return values;
}

function unpackAll(content) {
  const entries = Object.entries(content);
  return Object.fromEntries(entries.map(([name, value]) => [name, value?.kind ? unpack(value) : value]));
}

const waiting = {}, loaded = {};

function chunk(key, name, content) { // what a piece calls
  waiting[name]?.(key === about.key ? content : null);
}

function load(name) {
  return loaded[name] ??= new Promise((resolve, reject) => {
    if (inside[name]) return resolve(unpackAll(inside[name]));
    const script = el("script", { src: `${encodeURIComponent(about.folder)}/${name}.js` });
    const fail = why => {
      delete loaded[name];
      reject(new Error(`${why}, or make both again: ${COMMAND}`));
    };
    waiting[name] = content => content ? resolve(unpackAll(content)) :
      fail("the data beside this page are of another time than the page: open the page anew");
    script.addEventListener("error", () => fail(`${about.folder}/${name}.js is missing: keep it beside the page`));
    script.addEventListener("load", () => {
      delete waiting[name];
      script.remove();
    });
    document.head.append(script);
  });
}

// Tokens as text. A token may be part of a character: its bytes are U+DC80 .. U+DCFF, and the character is shown where
// its last byte is. What would not be seen, or would move other text, is shown as a sign or a number.

const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡" };
const UNSEEN = new RegExp("[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202f" +
  "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff]", "gu");
const HALF = /[\udc80-\udcff]/u, OTHER = /[\ud800-\udc7f\udd00-\udfff]/u; // with the u flag: halves that stand alone

function visible(text) {
  return text.replace(UNSEEN, c => SIGNS[c] ||
    (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `⟨${c.charCodeAt(0).toString(16)}⟩`));
}

function bytesOf(text) {
  return [...text].flatMap(c => HALF.test(c) ? [c.charCodeAt(0) - 0xdc00] : [...new TextEncoder().encode(c)]);
}

function decoded(bytes) { // the text, or null
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

const tokenText = token => about.vocabulary[token] ?? "\ufffd";

function textsOf(tokens) { // what is shown for each, and whether it is out of the ordinary
  let pending = [];
  return Array.from(tokens, token => {
    const text = tokenText(token);
    if (token === about.end || !HALF.test(text) || OTHER.test(text)) {
      pending = [];
      return { text: visible(text), odd: token === about.end };
    }
    const own = bytesOf(text), found = decoded([...pending, ...own]);
    pending = found !== null ? [] : pending.length + own.length < 4 ? [...pending, ...own] : own;
    const hex = own.map(byte => byte.toString(16).padStart(2, "0")).join(" ");
    return found !== null ? { text: visible(found), odd: false } : { text: `⟨${hex}⟩`, odd: true };
  });
}

function tokenPiece(token) {
  const [{ text, odd }] = textsOf([token]);
  return el("span", { class: odd ? "piece odd" : "piece", dir: "auto" }, text);
}

function tint(span, value, most) { // colour, an underline and a title say the same
  span.classList.toggle("on", value > 0);
  if (value) span.style.setProperty("--t", Math.min(1, value / most).toFixed(3));
  span.title = value ? value.toFixed(2) : "";
}

function tokenSpans(tokens, strength = [], peak = -1, most = 1) {
  return textsOf(tokens).map(({ text, odd }, at) => {
    const span = el("span", { class: `token${odd ? " odd" : ""}${at === peak ? " peak" : ""}` }, text);
    if (strength[at]) tint(span, strength[at], most);
    return span;
  });
}

// Features: a layer and an unfolded id; index i with sign + is id i, with sign - is id i + m

const nameOf = (layer, id) => `${layer}:${id % about.m}${id < about.m ? "+" : "-"}`;
const levelOf = id => about.lows.findLastIndex(low => low <= id % about.m);
const link = (layer, id) => el("a", { href: `#${nameOf(layer, id)}`, class: "mono" }, nameOf(layer, id));

function parseName(text) {
  const found = /^\s*(\d{1,9}):(\d{1,9})([+-]?)\s*$/.exec(text);
  if (!found || !about.layers.includes(Number(found[1])) || Number(found[2]) >= about.m) return null;
  return { layer: Number(found[1]), id: Number(found[2]) + (found[3] === "-" ? about.m : 0) };
}

async function tableOf(layer) {
  const found = await load(`table-${layer}`);
  found.layer = layer;
  return found;
}

function rowOf(found, id) { // ids are sorted
  let low = 0, high = found.ids.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (found.ids[middle] < id) low = middle + 1;
    else high = middle;
  }
  return found.ids[low] === id ? low : -1;
}

const share = (found, name, row) => found[name]?.[row] ? (found[name][row] - 1) / 10000 : NaN;
const labelOf = (found, row) => found.label?.[row] ? about.labels[found.label[row] - 1] : "";
const controlOf = (found, row) => found.label?.[row] && about.control ?
  about.control[found.layer]?.[found.label[row] - 1] ?? NaN : NaN;

// The text that the index is about, and where its documents start

let words = null, documents = null;

async function readWords() {
  if (words) return;
  const { tokens } = await load("corpus");
  documents = [0];
  tokens.forEach((token, at) => { if (token === about.end && at) documents.push(at); });
  documents.push(tokens.length);
  words = tokens;
}

// Search

function matcher(query) { // find(text, from): [start, end] of the first match from there on, or null; or an error
  const given = /^\/(.*)\/([a-z]*)$/s.exec(query);
  const [source, flags] = given ? [given[1], given[2].replace(/[gy]/g, "") + "g"] :
    [query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi"];
  try {
    const pattern = new RegExp(source, flags);
    return { find(text, from = 0) {
      pattern.lastIndex = from;
      const found = pattern.exec(text);
      return found && [found.index, found.index + Math.max(1, found[0].length)];
    } };
  } catch (error) {
    return { error: `That is no regular expression: ${error.message}` };
  }
}
