// The table of features: sorted by a column, searched by token, text, label or /regular expression/.

const COLUMNS = { // name: title, explanation, class, value to sort by, what is shown
  feature: ["feature", "layer, index and sign", "text", (t, r) => -r, (t, r) => link(t.layer, t.ids[r])],
  level: ["level", "", "wide", (t, r) => -levelOf(t.ids[r]), (t, r) => levelOf(t.ids[r])],
  rate: ["rate", "share of all tokens on which it fires", "", (t, r) => t.count[r],
    (t, r) => percent(t.count[r] / about.tokens, 3)],
  strength: ["strength", "its greatest |coefficient|", "wide", (t, r) => t.peak[r], (t, r) => fixed(t.peak[r])],
  purity: ["purity", "share of its label among its 20 strongest tokens", "wide", (t, r) => share(t, "purity", r),
    (t, r) => fixed(share(t, "purity", r))],
  effect: ["effect", "KL divergence of the next token's distribution without it, where it is strongest: millionths " +
    "of a nat", "narrow", (t, r) => t.kl?.[r] ?? NaN, (t, r) => millionths(t.kl?.[r])],
  label: ["label", "the label that it fits best in every other window", "text", (t, r) => labelRank(t, r),
    (t, r) => labelOf(t, r)],
  f1: ["F1", "of that label, in the windows that did not choose it", "", (t, r) => share(t, "f1", r),
    (t, r) => fixed(share(t, "f1", r))],
  hash: ["hash", "F1 of the hash control's best feature for that label, chosen and tested in the same way", "",
    (t, r) => controlOf(t, r), (t, r) => fixed(controlOf(t, r))],
  over: ["over hash", "F1 less the hash's", "wide", (t, r) => share(t, "f1", r) - controlOf(t, r),
    (t, r) => fixed(share(t, "f1", r) - controlOf(t, r))],
  tokens: ["strongest on", "the tokens where it is strongest", "text narrow", null, (t, r) => topTokens(t, r)],
};
const HAS_LABELS = about.labels.length > 0, MOST_ROWS = 5000;
const columns = Object.entries(COLUMNS).filter(([name]) =>
  (HAS_LABELS || !["label", "f1", "hash", "over", "purity"].includes(name)) &&
  (about.control || !["hash", "over"].includes(name)) && (about.lows.length > 2 || name !== "level"));
const SCOPES = { any: "anything", token: "tokens it is strongest on", text: "its strongest contexts",
  label: "its label" };

const list = { names: [], at: -1 }; // the features of the table as it was last seen, for the arrow keys

function topTokens(found, row) {
  const places = [...found.top.subarray(4 * row, 4 * row + 4)].filter(at => at !== NONE);
  return [...new Set(places.map(at => words[at]))].flatMap(token => [tokenPiece(token), " "]);
}

const alphabetical = [...about.labels].sort(), ranks = about.labels.map(label => -alphabetical.indexOf(label));
const labelRank = (t, r) => t.label?.[r] ? ranks[t.label[r] - 1] + share(t, "f1", r) / 2 : NaN;

// Search

function firstEnds(find) { // of every token, where the first match that starts there or later ends: contexts in O(1)
  const ends = new Uint32Array(words.length + 1).fill(NONE);
  for (let start = 0; start < words.length; start += about.context) {
    const texts = Array.from(words.subarray(start, start + about.context), tokenText), text = texts.join("");
    const offsets = [0];
    for (const part of texts) offsets.push(offsets.at(-1) + part.length);
    for (let at = 0, from = 0, found; from < text.length && (found = find(text, from)); from = found[0] + 1) {
      while (offsets[at + 1] <= found[0]) at++;
      let end = at;
      while (offsets[end + 1] < Math.min(text.length, found[1])) end++;
      ends[start + at] = Math.min(ends[start + at], start + end);
    }
  }
  for (let at = words.length - 1; at >= 0; at--) ends[at] = Math.min(ends[at], ends[at + 1]);
  return ends;
}

function tester(scope, find) { // (table, row) -> whether it is found
  if (scope === "label") {
    const known = about.labels.map(label => find(label) !== null);
    return (t, r) => known[t.label?.[r] - 1];
  }
  const top = test => (t, r) => {
    for (let k = 4 * r; k < 4 * r + 4; k++) if (t.top[k] !== NONE && test(t.top[k])) return true;
    return false;
  };
  if (scope === "token") {
    const known = about.vocabulary.map(text => find(text) !== null);
    return top(at => known[words[at]]);
  }
  const ends = firstEnds(find);
  return top(at => ends[at - Math.min(about.before, at % about.context)] < at + 1 + about.after);
}

function filterOf(query, scope) {
  if (!query) return { test: () => true };
  const { find, error } = matcher(query);
  if (error) return { error };
  const scopes = scope in SCOPES && scope !== "any" ? [scope] : ["label", "token"]; // contexts would find nearly all
  const tests = scopes.map(name => tester(name, find));
  return { test: (t, r) => tests.some(test => test(t, r)) };
}

function best(tables, filter, column, descending, count) { // the first `count` rows by a column, and of how many
  const value = COLUMNS[column][3], found = [], keys = [];
  for (const t of tables) {
    for (let r = 0; r < t.ids.length; r++) {
      if (!filter(t, r)) continue;
      const key = value(t, r);
      found.push([t, r]);
      keys.push(Number.isNaN(key) ? -Infinity : descending ? key : -key);
    }
  }
  let order = Array.from(keys.keys());
  if (keys.length > count) { // only what is shown is sorted by comparing
    const least = Float64Array.from(keys).sort()[keys.length - count];
    order = order.filter(at => keys[at] >= least);
  }
  order.sort((a, b) => keys[b] - keys[a] || a - b);
  return { rows: order.slice(0, count).map(at => found[at]), total: found.length };
}

// What is shown

function tableState(parameters) {
  const state = { layer: "all", level: "all", sort: HAS_LABELS && about.control ? "over" : "rate", down: "1", q: "",
    in: "any", n: PAGE, ...Object.fromEntries(parameters) };
  if (!COLUMNS[state.sort]?.[3]) state.sort = "rate";
  const many = sum(about.levels.flat().map(f => f.signed)) > 200000;
  if (many && !parameters.has("layer")) state.layer = String(about.layers[0]);
  return state;
}

function headOf(state, go) {
  return columns.map(([name, [title, why, kind, value]]) => {
    const sorted = name === state.sort, down = state.down === "1";
    const turned = () => go({ sort: name, down: sorted && down ? "0" : "1" });
    const order = sorted && (down ? "descending" : "ascending");
    return el("th", { class: kind, scope: "col", title: why, "aria-sort": order },
      value ? el("button", { type: "button", "data-sort": name, onclick: turned },
        title, sorted && (down ? " ↓" : " ↑")) : title);
  });
}

function filtersOf(state, go) {
  const choice = (name, options, title) => el("label", {}, title,
    el("select", { id: `pick-${name}`, onchange: event => go({ [name]: event.target.value }) },
      options.map(([value, text]) => el("option", { value, selected: String(value) === state[name] }, text))));
  const numbers = values => [["all", "all"], ...values.map(value => [value, value])];
  return el("div", { class: "filters" }, choice("layer", numbers(about.layers), "layer"),
    about.lows.length > 2 && choice("level", numbers([...about.lows.keys()].slice(0, -1)), "level"),
    choice("in", Object.entries(SCOPES), "search in"),
    state.q && el("span", {}, "“", el("bdi", { class: "mono" }, visible(state.q)), "” ",
      button("clear", () => go({ q: "" }))));
}

function rowElement([t, r], at) {
  const open = event => { if (event.target.tagName !== "A") location.hash = list.names[at]; };
  return el("tr", { "data-name": list.names[at], onclick: open },
    columns.map(([, [, , kind, , show]]) => cell(show(t, r), kind)));
}

views.features = async parameters => {
  const state = tableState(parameters), count = Math.min(MOST_ROWS, Number(state.n) || PAGE);
  const go = change => { location.hash = `features?${new URLSearchParams({ ...state, n: PAGE, ...change })}`; };
  await readWords();
  const layers = about.layers.filter(layer => state.layer === "all" || String(layer) === state.layer);
  const tables = await Promise.all(layers.map(tableOf)), { test, error } = filterOf(state.q, state.in);
  const inLevel = state.level === "all" ? () => true : id => levelOf(id) === Number(state.level);
  const { rows, total } = error ? { rows: [], total: 0 } :
    best(tables, (t, r) => inLevel(t.ids[r]) && test(t, r), state.sort, state.down === "1", count);
  list.names = rows.map(([t, r]) => nameOf(t.layer, t.ids[r]));
  list.back = location.hash;
  return el("div", {},
    el("div", { class: "title" }, el("h1", {}, "Features"),
      el("span", { class: "badge", id: "total" }, `${whole(total)} that fire`)),
    filtersOf(state, go), error && problem(error),
    !error && !total && el("p", {}, "Nothing is found: try another place to search in, or /a regular expression/."),
    rows.length > 0 && el("div", { class: "scroll" }, el("table", { id: "rows" },
      el("thead", {}, el("tr", {}, headOf(state, go))), el("tbody", {}, rows.map(rowElement)))),
    rows.length < total && count < MOST_ROWS && el("p", {}, button(`show more than the first ${whole(rows.length)}`,
      () => go({ n: Math.min(MOST_ROWS, 4 * count) }), { id: "more" })),
    soft("Rate: share of all tokens. Strength: greatest |coefficient|. Label: the best F1 in every other window of " +
      "the text; F1 and the hash's are those of the other windows. Purity: share of the label among the 20 strongest " +
      "tokens. Effect: KL divergence of the next token's distribution without the feature, where it is strongest, " +
      "in millionths of a nat."));
};

function choose(at) { // a row, as by the arrow keys
  const rows = document.querySelectorAll("#rows tbody tr");
  rows[list.at]?.classList.remove("chosen");
  list.at = Math.max(-1, Math.min(rows.length - 1, at));
  rows[list.at]?.classList.add("chosen");
  rows[list.at]?.scrollIntoView({ block: "nearest" });
}
