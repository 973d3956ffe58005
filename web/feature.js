// What there is to see: overview, table, feature, texts. Each view returns an element.

// Overview

const CLASSES = ["never", ...about.edges.map(edge => `<10^${Math.round(Math.log10(edge))}`), "more"];

function spread(figures) {
  const most = Math.max(...figures.histogram);
  const bars = figures.histogram.map((count, at) => {
    const bar = el("i", { title: `${CLASSES[at]}: ${whole(count)} features` });
    bar.style.height = `${count ? Math.max(2, 24 * Math.sqrt(count / most)) : 0}px`;
    return bar;
  });
  return el("span", {
    class: "spread",
    role: "img",
    "aria-label": figures.histogram.map((count, at) =>
      `${CLASSES[at]}: ${count}`).join(", ")
  }, bars);
}

const card = (value, text) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, text));

function worldNote() {
  const world = about.toy ?
    "The text is a toy world: a few dozen kinds of sentence about 32 topics, people, jobs, towns and years, written by " +
    "a program, so that it is known of every token what it stands for. It is no evidence about language." :
    "What is known of the tokens of this text is only what needs no tagger: their form, short lists of words, and " +
    "where sentences begin.";
  const control = about.kind === "hash" ?
    "This page shows the control itself: an untrained bottleneck on randomly rotated activations. What its features " +
    "seem to stand for is what chance gives." :
    "A label means nothing by itself: an untrained hash of the same activations finds some, too. So beside every score " +
    "stands the hash's, chosen and tested in the same way, and it decides.";
  return el("div", { class: "note" }, el("p", {}, world), el("p", {}, control));
}

function lossTable() {
  const own = about.kind === "own",
    { loss, rows } = about.losses;
  const value = (number, base) => [number.toFixed(4), el("span", { class: "soft small narrow" },
    number === base ? "        " : ` ${signed(number - base)}`)];
  return [table([
      ["layer", "text"], "y = code", "y = h", "y = 0"
    ], rows.map((row, at) =>
      el("tr", { class: at === rows.length - 1 ? "sum" : "" }, cell(at < rows.length - 1 ? about.layers[at] :
          "all", "text"),
        cell(value(row.code, loss)), cell(value(row.h, loss)), cell(value(row.zero, loss))))),
    el("p", { class: "soft small" },
      `Nats per token, and the difference to the model as it is (${loss.toFixed(4)}). ` +
      (own ? "y = h lets the whole input of a bottleneck through, so it shows what the sparse code costs; " :
        "y = code puts in what the source reconstructs, so it shows what that loses; y = h is the model as it is; "
        ) +
      `y = 0 lets nothing through. In this layer alone, or in all; ${about.losses.what}.`)
  ];
}

function levelTable() {
  const explained = about.losses.explained;
  return [table([
      ["layer", "text"],
      ["level", "text"], "features", "never fire", "L0", explained && "explained",
      ["how often they fire", "text"]
    ].filter(Boolean), about.levels.flatMap((levels, at) => levels.map((figures, level) =>
      el("tr", {}, cell(level ? "" : about.layers[at], "text"), cell(level, "text"), cell(whole(figures
          .features)),
        cell(percent(figures.dead, 2)), cell(figures.l0.toFixed(2)), explained && cell(fixed(explained[at][
          level], 3)),
        cell(spread(figures), "text"))))),
    el("p", { class: "soft small" },
      `Of ${whole(about.tokens)} tokens. L0: features active on a token. The bars: features ` +
      `that fire on ${CLASSES.join(", ")} of all tokens, their number on a square-root scale; the first are dead.` +
      (explained ? " Variance is explained by a level and those before it." : ""))
  ];
}

function rankingTable() {
  const { rows, tokens } = about.ranking;
  if (!rows.length) return el("p", { class: "soft" },
    "There are too few tokens to choose and test features for any label.");
  const good = rows.filter(row => row[3] >= 0.5).length;
  const every = about.m * about.layers.length * (about.kind === "sae" ? 1 : 2);
  const body = el("tbody"),
    more = el("button", { type: "button", class: "quiet", onclick: () => fill(rows.length) });

  function fill(count) {
    body.replaceChildren(...rows.slice(0, count).map(([name, label, chosen, unseen, control]) => el("tr", {},
      cell(el("a", { href: `#${name}`, class: "mono" }, name), "text"), cell(label, "text"), cell(chosen
        .toFixed(2), "narrow"),
      cell(el("b", {}, unseen.toFixed(2))), cell(control.toFixed(2)), cell(el("span", {},
        meter(unseen), meter(control, "ghost")), "grow"))));
    more.textContent = `all ${whole(rows.length)}`;
    more.hidden = count >= rows.length;
  }
  fill(12);
  const heads = { feature: "text", label: "text", chosen: "narrow", unseen: "", hash: "", "unseen, and the hash's": "text" };
  return el("div", {}, el("div", { class: "scroll" }, el("table", { class: "full" },
      el("thead", {}, el("tr", {}, Object.entries(heads).map(([head, kind]) => el("th", { scope: "col", class: kind }, head)))),
      body)), more,
    el("p", { class: "soft small" },
      `The rule of sample.py --top-features, on ${whole(tokens)} tokens: for each label with at least 100 ` +
      "tokens in each half of its words, the feature with the best F1 on one half; of these the best by that F1 (chosen). " +
      "Unseen is its F1 on the other half of the words, which chose nothing; hash that of the control's feature chosen in the " +
      `same way. ${whole(good)} features of ${whole(every)} are such a choice with at least 0.50 on unseen words: most stand for ` +
      "nothing that has a name here."));
}

views.overview = async () => {
  const figures = about.levels.flat(),
    total = sum(figures.map(f => f.features));
  const dead = sum(figures.map(f => f.dead * f.features)) / total;
  const last = about.losses.rows.at(-1),
    { shape } = about,
    own = about.kind === "own";
  return el("div", {},
    el("h1", {}, about.title),
    el("p", { class: "soft" },
      `${shape.bottleneck === "none" ? "A dense model" : `A model with ${shape.bottleneck} bottlenecks`}: ` +
      `${shape.layers} layers, width ${shape.d}, ${whole(about.parameters)} parameters, step ${whole(about.step)}, trained on ${about.data}. ` +
      `${own ? "Its own features" : `The source ${about.source}`}, where they fire in ${whole(about.tokens)} validation tokens.`
      ),
    el("div", { class: "cards" },
      card(whole(total), `features in ${about.layers.length} layers, each with two signs`),
      card(whole(about.firings), "firings"),
      card(percent(dead, 2), "never fire"),
      card(about.losses.loss.toFixed(4), "validation loss"),
      card(signed(last[own ? "h" : "code"] - about.losses.loss), own ? "loss with y = h in all layers" :
        "loss through the code, all layers"),
      card(signed(last.zero - about.losses.loss), "loss with y = 0 in all layers")),
    worldNote(),
    el("h2", {}, "Features that stand best for something"), rankingTable(),
    el("h2", {}, "Layers and levels"), levelTable(),
    el("h2", {}, "What the code costs"), lossTable(),
    el("h2", {}, "Ways around"),
    el("p", {}, el("a", { href: "#features" }, "All features"),
      " in a table that can be sorted and searched, by token, text or /regular " +
      "expression/; ", el("a", { href: "#texts" }, "texts"), " with the features of every token; ", LIVE ?
      [el("a", { href: "#live" }, "live"), ": type a text, edit features, steer."] :
      [el("span", { class: "mono" }, `python view.py ${about.run} --serve`),
        " adds typing, editing and steering."
      ]),
    el("p", { class: "soft small" }, "Keys: ", el("kbd", {}, "/"), " search, ", el("kbd", {}, "↑"), " ", el(
        "kbd", {}, "↓"), " a row or a layer, ",
      el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " the feature, text or token before and after, ", el(
        "kbd", {}, "Enter"), " open, ",
      el("kbd", {}, "Esc"),
      " back to the list. A feature's address is #layer:index and its sign, as in #2:1234+."));
};

// The table of features

const COLUMNS = { // name: title, explanation, kind, value to sort by, what is shown
  feature: ["feature", "layer, index and sign", "text", (t, r) => -r, (t, r) => link(t.layer, t.ids[r])],
  level: ["level", "", "wide", (t, r) => -levelOf(t.ids[r]), (t, r) => levelOf(t.ids[r])],
  rate: ["rate", "share of all tokens on which it fires", "", (t, r) => t.count[r], (t, r) => percent(t.count[r] /
    about.tokens, 3)],
  strength: ["strength", "its greatest |coefficient|", "wide", (t, r) => t.peak[r], (t, r) => fixed(t.peak[r])],
  purity: ["purity", "share of its label among its 20 strongest tokens", "wide", (t, r) => share(t, "purity", r), (
    t, r) => fixed(share(t, "purity", r))],
  effect: ["effect",
    "KL divergence of the next token's distribution without it, where it is strongest: thousandths of a nat",
    "narrow",
    (t, r) => t.kl?.[r] ?? NaN, (t, r) => fixed(t.kl ? 1000 * t.kl[r] : NaN)
  ],
  label: ["label", "the label that it fits best in every other window", "text", null, (t, r) => labelOf(t, r)],
  f1: ["F1", "of that label, in the windows that did not choose it", "", (t, r) => share(t, "f1", r), (t, r) =>
    fixed(share(t, "f1", r))
  ],
  hash: ["hash", "F1 of the hash control's best feature for that label, chosen and tested in the same way", "",
    (t, r) => controlOf(t, r), (t, r) => fixed(controlOf(t, r))
  ],
  over: ["over hash", "F1 less the hash's", "wide", (t, r) => share(t, "f1", r) - controlOf(t, r), (t, r) => fixed(
    share(t, "f1", r) - controlOf(t, r))],
  tokens: ["strongest on", "the tokens where it is strongest", "text narrow", null, (t, r) => topTokens(t, r)],
};
const SCOPES = { any: "anything", token: "tokens it is strongest on", text: "its strongest contexts",
  label: "its label" };
let words = null; // the corpus, once it is here

function topTokens(found, row) {
  const tokens = [...new Set([...found.top.subarray(4 * row, 4 * row + 4)].filter(at => at !== NONE).map(at => words[
    at]))];
  return tokens.flatMap(token => [tokenPiece(token), " "]);
}

function matcher(query) { // a function of a text, or an error to show
  const expression = /^\/(.*)\/([a-z]*)$/s.exec(query);
  if (!expression) return { find: text => { const at = text.toLowerCase().indexOf(query.toLowerCase()); return at <
        0 ? null : [at, at + query.length]; } };
  try {
    const pattern = new RegExp(expression[1], expression[2].replace(/[gy]/g, ""));
    return { find: text => { const found = pattern.exec(text); return found && [found.index, found.index + Math.max(1,
          found[0].length)]; } };
  } catch (error) { return { error: String(error.message) }; }
}

function firstEnds(find) { // of every token, where the first match that starts there or later ends: contexts in O(1)
  const ends = new Uint32Array(words.length + 1).fill(NONE),
    size = about.context;
  for (let start = 0; start < words.length; start += size) {
    const stop = Math.min(start + size, words.length),
      offsets = [];
    let text = "";
    for (let at = start; at < stop; at++) { offsets.push(text.length);
      text += tokenText(words[at]); }
    offsets.push(text.length);
    const place = offset => { let at = 0; while (offsets[at + 1] <= offset) at++; return at; };
    for (let from = 0, found; from < text.length && (found = find(text.slice(from))); from += found[0] + 1) {
      const at = start + place(from + found[0]),
        end = start + place(Math.min(text.length, from + found[1]) - 1);
      ends[at] = Math.min(ends[at], end);
    }
  }
  for (let at = words.length - 1; at >= 0; at--) ends[at] = Math.min(ends[at], ends[at + 1]);
  return ends;
}

function filterOf(query, scope) { // (table, row) -> bool
  if (!query) return { test: () => true };
  const { find, error } = matcher(query);
  if (error) return { error };
  const labels = new Set(),
    tests = [];
  if (scope === "any" || scope === "label") {
    about.labels.forEach((label, at) => { if (find(label)) labels.add(at + 1); });
    tests.push((t, r) => labels.has(t.label?.[r]));
  }
  if (scope === "any" || scope === "token") {
    const known = about.vocabulary.map(text => find(text) ? 1 : 0);
    tests.push((t, r) => { for (let k = 4 * r; k < 4 * r + 4; k++)
        if (t.top[k] !== NONE && known[words[t.top[k]]]) return true; return false; });
  }
  if (scope === "text") { // "anything" has the tokens themselves: contexts would find nearly all
    const ends = firstEnds(find);
    tests.push((t, r) => {
      for (let k = 4 * r; k < 4 * r + 4; k++) {
        const at = t.top[k];
        if (at !== NONE && ends[at - Math.min(about.before, at % about.context)] < at + 1 + about.after)
        return true;
      }
      return false;
    });
  }
  return { test: (t, r) => tests.some(test => test(t, r)) };
}

function best(tables, filter, column, descending, count) { // the first `count` rows by a column, and of how many
  const value = COLUMNS[column][3],
    found = [],
    keys = [],
    ranks = column === "label" && labelRanks();
  tables.forEach(t => {
    for (let r = 0; r < t.ids.length; r++) {
      if (!filter(t, r)) continue;
      let key = ranks ? (t.label?.[r] ? ranks[t.label[r] - 1] + share(t, "f1", r) / 2 : NaN) : value(t, r);
      if (Number.isNaN(key)) key = -Infinity;
      else if (!descending) key = -key;
      found.push([t, r]);
      keys.push(key);
    }
  });
  let order = keys.keys();
  if (keys.length > count) { // only what is shown is sorted by comparing
    const least = Float64Array.from(keys).sort()[keys.length - count];
    order = order.filter ? order.filter(at => keys[at] >= least) : [...order].filter(at => keys[at] >= least);
  }
  order = [...order].sort((a, b) => keys[b] - keys[a] || a - b).slice(0, count);
  return { rows: order.map(at => found[at]), total: found.length };
}

function labelRanks() {
  const sorted = [...about.labels].sort();
  return about.labels.map(label => -sorted.indexOf(label));
}

const list = { names: [], at: -1 }; // the features of the table as it was last seen, for the arrow keys

views.features = async parameters => {
  const state = {
    layer: "all",
    level: "all",
    sort: about.labels?.length ? "over" : "rate",
    down: "1",
    q: "",
    in: "any",
    n: PAGE,
    ...Object.fromEntries(parameters)
  };
  if (!COLUMNS[state.sort]) state.sort = "rate";
  const many = sum(about.levels.flat().map(f => f.signed)) > 200000;
  if (state.layer === "all" && many && !parameters.has("layer")) state.layer = String(about.layers[0]);
  words = await corpus();
  const chosen = state.layer === "all" ? about.layers : about.layers.filter(layer => String(layer) === state
    .layer);
  const tables = await Promise.all(chosen.map(tableOf));
  const { test, error } = filterOf(state.q, state.in);
  const inLevel = state.level === "all" ? () => true : (t, r) => levelOf(t.ids[r]) === Number(state.level);
  const count = Math.min(5000, Number(state.n) || PAGE);
  const { rows, total } = error ? { rows: [], total: 0 } :
    best(tables, (t, r) => inLevel(t, r) && test(t, r), state.sort, state.down === "1", count);
  list.names = rows.map(([t, r]) => nameOf(t.layer, t.ids[r]));
  list.back = location.hash;
  const go = change => { location.hash = `features?${new URLSearchParams({ ...state, n: PAGE, ...change })}`; };
  const choice = (name, options, title) => el("label", {}, title, el("select", { id: `pick-${name}`,
      onchange: event => go({
          [name]: event.target.value }) },
    Object.entries(options).map(([value, text]) => el("option", { value, selected: value === state[name] },
      text))));
  const columns = Object.entries(COLUMNS).filter(([name]) => about.labels?.length || !["label", "f1", "hash",
      "over", "purity"
    ].includes(name))
    .filter(([name]) => about.control || !["hash", "over"].includes(name)).filter(([name]) => name !== "level" ||
      about.lows.length > 2);
  const head = columns.map(([name, [title, why, kind, value]]) => {
    const sorted = name === state.sort;
    return el("th", { class: kind, scope: "col", title: why, "aria-sort": sorted && (state.down === "1" ?
          "descending" : "ascending") },
      value || name === "label" ? el("button", { type: "button", "data-sort": name, onclick: () =>
        go({ sort: name, down: sorted && state.down === "1" ? "0" : "1" }) },
        title, sorted ? (state.down === "1" ? " ↓" : " ↑") : "") : title);
  });
  const body = rows.map(([t, r], at) => el("tr", {
      "data-name": list.names[at],
      "data-at": at,
      onclick: event => { if (event.target.tagName !== "A") location.hash = list.names[at]; }
    },
    columns.map(([, [, , kind, , show]]) => cell(show(t, r), kind))));
  const more = rows.length < total && count < 5000;
  queueMicrotask(() => choose(list.names.indexOf(list.last ?? "")));
  return el("div", {},
    el("div", { class: "title" }, el("h1", {}, "Features"), el("span", { class: "badge", id: "total" },
      `${whole(total)} that fire`)),
    el("div", { class: "filters" },
      choice("layer", { all: "all", ...Object.fromEntries(about.layers.map(layer => [layer, layer])) },
      "layer"),
      about.lows.length > 2 && choice("level", { all: "all", ...Object.fromEntries(about.lows.slice(0, -1).map((
          _, level) => [level, level])) }, "level"),
      choice("in", SCOPES, "search in"),
      state.q && el("span", {}, "“", el("bdi", { class: "mono" }, visible(state.q)), "” ",
        el("button", { type: "button", class: "quiet", onclick: () => go({ q: "" }) }, "clear"))),
    error && el("div", { class: "problem" }, `That is no regular expression: ${error}`),
    !error && !total && el("p", {},
      "Nothing is found: try another place to search in, or /a regular expression/."),
    rows.length ? el("div", { class: "scroll" }, el("table", { id: "rows" }, el("thead", {}, el("tr", {},
      head)), el("tbody", {}, body))) : null,
    more && el("p", {}, el("button", { type: "button", id: "more", onclick: () => go({ n: Math.min(5000, 4 *
            count) }) },
      `show more than the first ${whole(rows.length)}`)),
    el("p", { class: "soft small" },
      "Rate: share of all tokens. Strength: greatest |coefficient|. Label: the best F1 in every other window of the text; " +
      "F1 and the hash's are those of the other windows. Purity: share of the label among the 20 strongest tokens. Effect: KL divergence of " +
      "the next token's distribution without the feature, where it is strongest, in thousandths of a nat."));
};

function choose(at) {
  const rows = document.querySelectorAll("#rows tbody tr");
  rows.forEach(row => row.classList.remove("chosen"));
  list.at = Math.max(-1, Math.min(rows.length - 1, at));
  const row = rows[list.at];
  if (row) { row.classList.add("chosen");
    row.scrollIntoView({ block: "nearest" }); }
}

// A feature

const BANDS = ["strongest", "first fifth", "second fifth", "third fifth", "fourth fifth", "last fifth"];

function contextList(block, place, tokens, layer, id, peak) {
  const groups = [];
  for (let c = block.starts[place]; c < block.starts[place + 1]; c++) {
    const at = block.at[c],
      first = at - block.left[c],
      last = Math.min(at + 1 + about.after, tokens.length);
    const strength = new Array(last - first).fill(0);
    for (let f = block.fire_starts[c]; f < block.fire_starts[c + 1]; f++) strength[block.fire_at[f]] = block
      .fire_value[f];
    const value = strength[at - first];
    const item = el("li", { "data-at": at, "data-band": block.band[c] },
      el("a", { class: "value", href: `#text@${at}`, title: "see it in its text" }, value.toFixed(2)),
      el("span", { class: "tokens" }, tokenSpans(tokens.subarray(first, last), strength, at - first, peak)));
    (groups[block.band[c]] ??= []).push(item);
  }
  return groups.map((items, band) => [el("h3", {}, band ? `${BANDS[band]} by strength` : "where it is strongest"),
    el("ul", { class: "contexts" }, items)
  ]);
}

function histogram(counts, peak, total) {
  const most = Math.max(...counts),
    width = peak / counts.length;
  const bars = [...counts].map((count, at) => {
    const bar = el(
    "i", { title: `${(at * width).toFixed(2)} to ${((at + 1) * width).toFixed(2)}: ${whole(count)}` });
    bar.style.height = `${count ? Math.max(1.5, 100 * count / most) : 0}%`;
    return bar;
  });
  return el("div", {}, el("h3", {}, "firings by strength"),
    el("div", { class: "bars", id: "histogram",
    role: "img", "aria-label": `${whole(total)} firings, strengths up to ${peak.toFixed(2)}` }, bars),
    el("div", { class: "axis" }, el("span", {}, "0"), el("span", {}, `${whole(most)} in the tallest`), el(
      "span", {}, peak.toFixed(2))));
}

function effectList(title, tokens, values, kind) {
  const most = Math.max(...values, 1e-9);
  return el("div", {}, el("h3", {}, title), el("table", { class: "list" }, el("tbody", {}, [...tokens].map((token,
    at) =>
    el("tr", {}, cell(tokenPiece(token), "text"), cell(fixed(values[at])), cell(meter(values[at] / most,
      kind), "grow"))))));
}

function effectsOf(block, place) {
  const row = block.effect_of ? block.effect_of.indexOf(place) : -1;
  if (row < 0 || Number.isNaN(block.up_values[row * 8])) return null;
  const part = name => block[name].subarray(8 * row, 8 * row + 8);
  return { ups: part("ups"), up: part("up_values"), downs: part("downs"), down: part("down_values") };
}

function showEffects(effect, count) {
  return [el("div", { class: "halves" }, effectList("raises", effect.ups, effect.up), effectList("lowers", effect
      .downs, effect.down, "down")),
    el("p", { class: "soft small" },
      `Change of the next token's logit by the feature, above the mean of all tokens: the mean of its ${Math.min(about.effect_at, count)} strongest firings.`
      )
  ];
}

function relatives(title, note, block, name, place, layer, total, found) {
  const low = block[`${name}_starts`][place],
    high = block[`${name}_starts`][place + 1];
  if (low === high) return null;
  const rows = [];
  for (let at = low; at < high; at++) {
    const id = block[`${name}_ids`][at],
      count = block[`${name}_counts`][at],
      row = rowOf(found, id);
    rows.push(el("tr", { "data-kind": name }, cell(link(layer, id), "text"), cell(whole(count), "soft"), cell(percent(
        count / total, 0)),
      cell(meter(count / total), "grow"), cell(row < 0 ? "" : el("span", { class: "soft small" }, labelOf(found,
        row)), "text wide")));
  }
  return [el("h3", { title: note }, title), el("table", { class: "list" }, el("tbody", {}, rows))];
}

function figuresOf(found, row, id, count) {
  const label = labelOf(found, row),
    control = controlOf(found, row);
  const cards = [card(percent(count / about.tokens, 3), `of tokens: ${whole(count)} of ${whole(about.tokens)}`),
    card(fixed(found.peak[row]), `greatest strength, ${fixed(found.mean[row])} on average`)
  ];
  if (label) {
    cards.push(card(label,
      `best label: precision ${fixed(share(found, "precision", row))}, recall ${fixed(share(found, "recall", row))}`
      ));
    cards.push(card(fixed(share(found, "f1", row)), about.control ?
      `F1 of it; the hash's best has ${fixed(control)}` : "F1 of it"));
  }
  if (!Number.isNaN(share(found, "purity", row))) cards.push(card(fixed(share(found, "purity", row)),
    "purity: its label among the 20 strongest"));
  if (found.kl && !Number.isNaN(found.kl[row])) cards.push(card(fixed(1000 * found.kl[row]),
    "effect, thousandths of a nat"));
  return el("div", { class: "cards", id: "figures" }, cards);
}

function otherSign(found, layer, id) {
  const other = id < about.m ? id + about.m : id - about.m,
    row = rowOf(found, other);
  return el("p", { id: "other-sign" }, "The same index with the other sign, ", link(layer, other), row < 0 ?
    ", never fires." :
    [`, fires on ${percent(found.count[row] / about.tokens, 3)}`, labelOf(found, row) ?
      `, best label ${labelOf(found, row)} (F1 ${fixed(share(found, "f1", row))})` : "",
      ", strongest on ", topTokens(found, row), " The two are unrelated features."
    ]);
}

function neighbours(name) {
  const at = list.names.indexOf(name);
  const button = (text, step, key) => el("button", {
    type: "button",
    class: "quiet",
    disabled: !list.names[at + step] || at < 0,
    title: `${key} in the table's order`,
    onclick: () => { location.hash = list.names[at + step]; }
  }, text);
  return [button("← before", -1, "the one before"), button("after →", 1, "the one after")];
}

views.feature = async ({ layer, id }) => {
  const name = nameOf(layer, id),
    found = await tableOf(layer),
    row = rowOf(found, id);
  words = await corpus();
  list.last = name;
  const title = el("div", { class: "title" }, el("h1", { class: "mono" }, name),
    el("span", { class: "badge" }, `layer ${layer}`), about.lows.length > 2 && el("span", { class: "badge" },
      `level ${levelOf(id)}`),
    about.kind !== "own" && el("span", { class: "badge" }, about.source), el("span", { class: "push" },
      neighbours(name)));
  if (row < 0) return el("div", {}, title, el("p", {},
    `It never fires in these ${whole(about.tokens)} tokens: there is nothing to show.`), otherSign(found,
    layer, id));
  const block = await load(`block-${layer}-${Math.floor(id / about.block)}`),
    place = id % about.block;
  const count = found.count[row],
    peak = found.peak[row],
    effect = effectsOf(block, place);
  const ranked = about.ranking.rows.filter(item => item[0] === name);
  const counts = block.histogram.subarray(24 * place, 24 * place + 24);
  const missing = el("p", { class: "soft small" }, "What it does to the next token was not computed: ", LIVE ?
    "it is asked for now …" :
    el("span", { class: "mono" },
      `python view.py ${about.run} --effects ${sum(about.levels.flat().map(f => f.signed))}`));
  const effectBox = el("div", { id: "effects" }, effect ? showEffects(effect, count) : missing);
  if (LIVE && !effect) live.effect(name, effectBox);
  return el("div", {}, title, figuresOf(found, row, id, count),
    ranked.map(([, label, chosen, unseen, control]) => el("p", { class: "note" },
      `Chosen as the best feature for “${label}” on half of its words (F1 ${chosen.toFixed(2)}): ` +
      `on the other half F1 is ${unseen.toFixed(2)}, the hash's ${control.toFixed(2)}.`)),
    LIVE && live.controls(layer, id, peak),
    el("div", { class: "two" },
      el("section", { id: "contexts" }, contextList(block, place, words, layer, id, peak)),
      el("section", {}, histogram(counts, peak, count), effectBox,
        relatives("parents that fire with it", "features it is a child of", block, "parents", place, layer,
          count, found),
        relatives("children that fire with it", "features that are scored where it is active", block,
          "children", place, layer, count, found),
        relatives("features that fire with it",
          "by cosine: common tokens over the root of the product of both counts", block, "allies", place, layer,
          count, found),
        el("p", { class: "soft small" },
          "Counts of tokens on which both fire, and their share of this feature's. The last list is by cosine: a feature that fires everywhere is near to none."
          ),
        el("h3", {}, "the other sign"), otherSign(found, layer, id))));
};

// Texts

function preview(tokens) {
  return textsOf(tokens).filter(part => !part.odd).map(part => part.text).join("");
}

views.texts = async parameters => {
  words = await corpus();
  const starts = await documentStarts(),
    query = parameters.get("q") || "",
    shown = Number(parameters.get("n")) || 60;
  const { find, error } = query ? matcher(query) : { find: () => [0, 1] };
  const numbers = [];
  for (let n = 0; n + 1 < starts.length && !error; n++)
    if (find(Array.from(words.subarray(starts[n], starts[n + 1]), tokenText).join(""))) numbers.push(n);
  const go = change => { location.hash = `texts?${new URLSearchParams({ q: query, ...change })}`; };
  return el("div", {},
    el("div", { class: "title" }, el("h1", {}, "Texts"), el("span", { class: "badge" },
      `${whole(numbers.length)} of ${whole(starts.length - 1)} validation documents`)),
    el("form", { class: "filters", onsubmit: event => { event.preventDefault();
          go({ q: event.target.elements.q.value }); } },
      el("input", { name: "q", type: "search", value: query,
      placeholder: "text or /regular expression/", "aria-label": "search texts" }),
      el("button", {}, "search")),
    error && el("div", { class: "problem" }, `That is no regular expression: ${error}`),
    table(null, numbers.slice(0, shown).map(n => el("tr", {}, cell(el("a", { href: `#text/${n}` }, whole(n))),
      cell(`${whole(starts[n + 1] - starts[n])} tokens`, "soft small narrow"),
      cell(el("bdi", {}, preview(words.subarray(starts[n], Math.min(starts[n + 1], starts[n] + 40))), " …"),
        "text wrap")))),
    numbers.length > shown && el("p", {}, el("button", { type: "button", onclick: () => go({ n: 4 * shown }) },
      `show more than the first ${shown}`)));
};

async function codesAt(layer, at) { // [[id, strength]] of a token, the strongest first
  const windows = about.text_windows[about.layers.indexOf(layer)],
    size = windows * about.context;
  const part = await load(`text-${layer}-${Math.floor(at / size)}`),
    place = at % size,
    found = [];
  for (let e = part.starts[place]; e < part.starts[place + 1]; e++) found.push([part.ids[e], part.strength[e]]);
  return found.sort((a, b) => b[1] - a[1]);
}

// Tokens in a row, the features of the chosen one below, and the text tinted by any of them. codes: (layer, place) -> list
function reader(tokens, codes, breaks, start, onchoose) {
  const spans = tokenSpans(tokens, [], -1, 1),
    panel = el("div", { id: "panel" });
  const tint = el("p", { class: "soft small", id: "tint" },
    "Choose a token, by a click or the arrow keys; choose a feature below to tint the text by it.");
  let chosen = -1;
  async function paint(layer, id) {
    const values = [];
    for (let at = 0; at < tokens.length; at++) values.push((await codes(layer, at)).find(pair => pair[0] === id)?.[
      1] || 0);
    const most = Math.max(...values);
    spans.forEach((span, at) => { span.style.setProperty("--t", (most ? values[at] / most : 0).toFixed(3));
      span.title = values[at] ? values[at].toFixed(2) : ""; });
    tint.replaceChildren("Tinted by ", link(layer, id),
      `: at most ${most.toFixed(2)}, on ${values.filter(Boolean).length} of ${tokens.length} tokens. `,
      el("button", { type: "button", class: "quiet", onclick: () => { spans.forEach(span => { span.style
              .setProperty("--t", 0);
            span.title = ""; });
          tint.replaceChildren("No tint."); } }, "clear"));
  }
  async function select(at, scroll = true) {
    at = Math.max(0, Math.min(tokens.length - 1, at));
    spans[chosen]?.classList.remove("here");
    chosen = at;
    spans[at].classList.add("here");
    if (scroll) spans[at].scrollIntoView({ block: "nearest" });
    const columns = await Promise.all(about.layers.map(async layer => [layer, await codes(layer, at)]));
    if (chosen !== at) return;
    const boxes = columns.map(([layer, found]) => layerBox(layer, found, paint));
    panel.replaceChildren(el("h2", {}, `Token ${at}: `, tokenPiece(tokens[at])), el("div", { class: "layers" },
      boxes));
    onchoose?.(at);
  }
  spans.forEach((span, at) => {
    if (tokenText(tokens[at]).includes("\n")) span.append("\n");
    if (breaks?.has(at)) { span.classList.add("break"); }
    span.addEventListener("click", () => select(at));
  });
  reader.step = by => select(chosen + by);
  queueMicrotask(() => select(start, Boolean(breaks)));
  return el("div", {}, el("div", { class: "tokens document", id: "document" }, spans), tint, panel);
}

function layerBox(layer, found, paint) {
  const most = Math.max(...found.map(pair => pair[1]), 1e-9),
    body = el("tbody");
  const box = el("div", { "data-layer": layer }, el("h3", {}, `layer ${layer}, ${found.length} active`), el(
  "table", { class: "list" }, body));
  async function fill(count) {
    const known = await tableOf(layer).catch(() => null);
    body.replaceChildren(...found.slice(0, count).map(([id, strength]) => {
      const row = known ? rowOf(known, id) : -1;
      return el("tr", {}, cell(link(layer, id), "text"), cell(strength.toFixed(2)), cell(meter(strength /
          most), "grow"),
        cell(el("button", { type: "button", class: "quiet",
        title: "tint the text by it", "aria-label": `tint by ${nameOf(layer, id)}`, onclick: () =>
            paint(layer, id) }, "tint")),
        cell(el("span", { class: "soft small" }, row < 0 ? "" : labelOf(known, row)), "text cut"));
    }));
    if (count < found.length) box.append(el("button", { type: "button", class: "quiet", onclick: event => { event
          .target.remove();
        fill(found.length); } }, `all ${found.length}`));
  }
  fill(6);
  return box;
}

views.text = async ({ number, at }) => {
  words = await corpus();
  const starts = await documentStarts();
  const n = Math.max(0, Math.min(starts.length - 2, number ?? documentAt(at)));
  const first = starts[n],
    tokens = words.subarray(first, starts[n + 1]),
    breaks = new Set();
  for (let place = 1; place < tokens.length; place++)
    if ((first + place) % about.context === 0) breaks.add(place);
  list.text = n;
  return el("div", {},
    el("div", { class: "title" }, el("h1", {}, `Text ${n}`), el("span", { class: "badge" },
        `tokens ${whole(first)} to ${whole(starts[n + 1] - 1)} of the validation split`),
      el("span", { class: "push" }, el("button", { type: "button", class: "quiet", onclick: () => { location
              .hash = `text/${Math.max(0, n - 1)}`; } }, "← before"),
        el("button", { type: "button", class: "quiet", onclick: () => { location.hash = `text/${n + 1}`; } },
          "after →"))),
    breaks.size ? el("p", { class: "soft small" },
      `A dotted line is where a window of ${about.context} tokens begins: the model saw nothing before it.`) :
    null,
    reader(tokens, (layer, place) => codesAt(layer, first + place), breaks, at === undefined ? Math.min(1,
      tokens.length - 1) : at - first));
};