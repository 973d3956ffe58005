// Texts: a list of validation documents, and one of them with the features of every token and layer.

views.texts = async parameters => {
  await readWords();
  const query = parameters.get("q") || "", shown = Number(parameters.get("n")) || 60, numbers = [];
  const { find, error } = matcher(query);
  const tokensOf = n => words.subarray(documents[n], documents[n + 1]);
  for (let n = 0; n + 1 < documents.length && !error; n++) {
    if (!query || find(Array.from(tokensOf(n), tokenText).join(""))) numbers.push(n);
  }
  const preview = n => textsOf(tokensOf(n).subarray(0, 40)).filter(part => !part.odd).map(part => part.text).join("");
  const go = change => { location.hash = `texts?${new URLSearchParams({ q: query, ...change })}`; };
  const search = event => {
    event.preventDefault();
    go({ q: event.target.elements.q.value });
  };
  return el("div", {},
    el("div", { class: "title" }, el("h1", {}, "Texts"), el("span", { class: "badge" },
      `${whole(numbers.length)} of ${whole(documents.length - 1)} validation documents`)),
    el("form", { class: "filters", onsubmit: search },
      el("input", { name: "q", type: "search", value: query, placeholder: "text or /regular expression/",
        "aria-label": "search texts" }), el("button", {}, "search")),
    error && problem(error),
    table([], numbers.slice(0, shown).map(n => el("tr", {}, cell(el("a", { href: `#text/${n}` }, whole(n))),
      cell(`${whole(tokensOf(n).length)} tokens`, "soft small narrow"),
      cell(el("bdi", {}, preview(n), " …"), "text wrap")))),
    numbers.length > shown && el("p", {}, button(`show more than the first ${shown}`, () => go({ n: 4 * shown }))));
};

async function codesAt(layer, at) { // [[id, strength]] of a token, the strongest first
  const size = about.text_windows[about.layers.indexOf(layer)] * about.context, place = at % size, found = [];
  const part = await load(`text-${layer}-${Math.floor(at / size)}`);
  for (let e = part.starts[place]; e < part.starts[place + 1]; e++) found.push([part.ids[e], part.strength[e]]);
  return found.sort((a, b) => b[1] - a[1]);
}

// Tokens in a row, the features of the chosen one below, and the text tinted by any of them.
// codes: (layer, place) -> [[id, strength]]. breaks: places before which the model saw nothing.

function reader(tokens, codes, start, { breaks = new Set(), edit = null, scroll = false } = {}) {
  const spans = tokenSpans(tokens), panel = el("div", { id: "panel" });
  const note = el("p", { class: "soft small", id: "tint" },
    "Choose a token, by a click or the arrow keys; choose “tint” below to tint the text by a feature.");
  let chosen = -1;

  async function paint(layer, id) {
    const found = await Promise.all(spans.map((_, at) => codes(layer, at)));
    const values = found.map(pairs => pairs.find(pair => pair[0] === id)?.[1] || 0), most = Math.max(...values);
    const count = values.filter(Boolean).length;
    spans.forEach((span, at) => tint(span, values[at], most));
    const clear = button("clear", () => {
      spans.forEach(span => tint(span, 0));
      note.replaceChildren("No tint.");
    });
    note.replaceChildren("Tinted by ", link(layer, id),
      `: at most ${most.toFixed(2)}, on ${count} of ${tokens.length} tokens. `, clear);
  }

  async function select(at, move = true) {
    chosen = at;
    document.querySelector("#document .here")?.classList.remove("here");
    spans[at].classList.add("here");
    if (move) spans[at].scrollIntoView({ block: "nearest" });
    const columns = await Promise.all(about.layers.map(async layer => [layer, await codes(layer, at)]));
    if (chosen !== at) return; // another was chosen meanwhile
    const boxes = columns.map(([layer, found]) => layerBox(layer, found, paint, edit));
    panel.replaceChildren(el("h2", {}, `Token ${at}: `, tokenPiece(tokens[at])), el("div", { class: "layers" }, boxes));
  }

  spans.forEach((span, at) => {
    if (tokenText(tokens[at]).includes("\n")) span.append("\n");
    if (breaks.has(at)) span.classList.add("break");
    span.addEventListener("click", () => select(at));
  });
  reader.step = by => select(Math.max(0, Math.min(tokens.length - 1, chosen + by)));
  queueMicrotask(() => select(start, scroll));
  return el("div", {}, el("div", { class: "tokens document", id: "document" }, spans), note, panel);
}

function layerBox(layer, found, paint, edit) { // the features of a token in a layer
  const body = el("tbody"), few = 6;
  const fill = async count => {
    const known = await tableOf(layer);
    body.replaceChildren(...found.slice(0, count).map(([id, strength]) => el("tr", {},
      cell(link(layer, id), "text"), cell(strength.toFixed(2)),
      cell([button("tint", () => paint(layer, id), { "aria-label": `tint by ${nameOf(layer, id)}` }),
        edit && button("edit", () => edit(layer, id), { "aria-label": `edit ${nameOf(layer, id)}` })]),
      cell(el("span", { class: "soft small" }, labelOf(known, rowOf(known, id))), "text cut"))));
  };
  const more = found.length > few && button(`all ${found.length}`, event => {
    event.target.remove();
    fill(found.length);
  });
  fill(few);
  return el("div", { "data-layer": layer }, el("h3", {}, `layer ${layer}, ${found.length} active`),
    el("table", { class: "list" }, body), more);
}

views.text = async ({ number, at }) => { // by its number, or by a token in it
  await readWords();
  const last = documents.length - 2, place = Math.min(Number(at ?? 0), words.length - 1);
  const n = at === undefined ? Math.min(last, Number(number ?? 0)) : documents.findLastIndex(start => start <= place);
  const first = documents[n], tokens = words.subarray(first, documents[n + 1]), breaks = new Set();
  for (let k = 1; k < tokens.length; k++) if ((first + k) % about.context === 0) breaks.add(k);
  const other = (text, to) => button(text, () => { location.hash = `text/${to}`; }, { disabled: to < 0 || to > last });
  return el("div", {},
    el("div", { class: "title" }, el("h1", {}, `Text ${whole(n)}`),
      el("span", { class: "badge" },
        `tokens ${whole(first)} to ${whole(documents[n + 1] - 1)} of the validation split`),
      el("span", { class: "push" }, other("← before", n - 1), other("after →", n + 1))),
    breaks.size > 0 && soft(`A dotted line is where a window of ${about.context} tokens begins: the model saw ` +
      "nothing before it."),
    reader(tokens, (layer, k) => codesAt(layer, first + k), at === undefined ? Math.min(1, tokens.length - 1) :
      place - first, { breaks, scroll: true }));
};
