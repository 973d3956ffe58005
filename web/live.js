// The live parts, where view.py --serve has put a model behind the page.

const live = {
  given: { text: about.toy ? "In 1436, a" : "The", edits: [], concept: "", alpha: 1, tokens: 60, temperature: 0.8,
    seed: 0 },
  concepts: null,
  running: null,
  turn: 0,

  async ask(name, content = {}) {
    const answer = await fetch(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(content) });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  },

  async effect(name, box) { // of a feature that the page knows none of
    try {
      const found = await live.ask("effect", { feature: name });
      box.replaceChildren(...showEffects(found, about.effect_at));
    } catch (error) { box.replaceChildren(el("p", { class: "soft small" }, error.message)); }
  },

  add(layer, id, kind, amount) {
    live.given.edits.push({ feature: nameOf(layer, id), layers: [layer], kind, amount });
    location.hash = "live";
  },

  controls(layer, id, peak) { // on a feature's page
    const button = (text, kind, amount, why) => el("button", { type: "button", "data-edit": kind, title: why,
      onclick: () => live.add(layer, id, kind, amount) }, text);
    return el("div", { class: "controls", id: "edit" }, el("span", { class: "soft small" },
        "Edit it and see what the model writes:"),
      button("zero", "zero", 0, "its coefficient becomes 0 wherever it is active"),
      button("scale", "scale", 2, "its coefficient is multiplied wherever it is active"),
      button("add", "add", Number(peak.toFixed(1)), "so much of it is added on every token"));
  },
};

function editRow(edit, changed) {
  const amount = el("input", { type: "number", step: "0.1", value: edit.amount, "aria-label": "amount" });
  const slider = el("input", { type: "range", min: -10, max: 10, step: 0.1, value: edit
    .amount, "aria-label": "amount" });
  const set = value => { edit.amount = Number(value) || 0;
    amount.value = slider.value = edit.amount;
    changed(); };
  amount.addEventListener("change", () => set(amount.value));
  slider.addEventListener("input", () => set(slider.value));
  const sizes = [amount, slider];
  const kind = el("select", { "aria-label": "what to do", onchange: event => { edit.kind = event.target.value;
        hide();
        changed(); } },
    ["zero", "scale", "add"].map(name => el("option", { value: name, selected: name === edit.kind }, name)));
  const hide = () => sizes.forEach(node => { node.hidden = edit.kind === "zero"; });
  hide();
  const layers = about.layers.map(layer => el("label", {}, el("input", {
    type: "checkbox",
    checked: edit.layers.includes(layer),
    onchange: event => {
      edit.layers = about.layers.filter(item => item === layer ? event.target.checked : edit.layers
        .includes(item));
      changed();
    }
  }), layer));
  const { layer, id } = parseName(edit.feature);
  return el("div", { class: "edit controls" }, link(layer, id), kind, amount, slider, el(
    "span", { class: "soft small" }, "at layers"), layers,
    el("button", { type: "button", class: "quiet", onclick: () => { live.given.edits.splice(live.given.edits
          .indexOf(edit), 1);
        changed(true); } }, "remove"));
}

function nextTable(tokens) {
  const most = Math.max(...tokens.flatMap(([, before, after]) => [before, after]), 1e-9);
  return table([["next token", "text"], "unedited", "edited", ["grey is unedited", "text small"]],
    tokens.map(([token, before, after]) => el("tr", { "data-token": token },
      cell(tokenPiece(token), "text"), cell(percent(before)), cell(percent(after)),
      cell([meter(before / most, "ghost"), meter(after / most)], "grow"))), "full");
}

async function generate(outputs, note, buttons) {
  const stop = new AbortController(),
    given = structuredClone(live.given);
  live.running = stop;
  buttons.start.disabled = true;
  buttons.stop.disabled = false;
  outputs.forEach(box => box.replaceChildren(el("span", { class: "given" }, given.text)));
  note.textContent = "writing …";
  try {
    const answer = await fetch("/api/generate", { method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(given), signal: stop.signal });
    if (!answer.ok) throw new Error((await answer.json()).error);
    const reading = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "",
      ended = null;
    for (let part; !(part = await reading.read()).done;) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const event of lines.map(line => JSON.parse(line))) {
        if (event.text) outputs[event.side].append(event.text);
        if (event.status) note.textContent = event.status;
        if (event.error) throw new Error(event.error);
        if (event.done) ended = event.stopped ? "stopped" : "done";
      }
    }
    note.textContent = ended || "the connection ended early";
    if (given.concept) buttons.changed();
  } catch (error) { note.textContent = error.name === "AbortError" ? "stopped" : error.message; } finally { live
      .running = null;
    buttons.start.disabled = false;
    buttons.stop.disabled = true; }
}

views.live = async () => {
  if (!LIVE) return el("div", {}, el("h1", {}, "Live"),
    el("p", {}, "This page was opened from the disk, so that there is no model behind it. With"), el(
      "pre", {},
      `python view.py ${about.run}${about.kind === "own" ? "" : ` --source ${about.option}`} --serve`),
    el("p", {},
      "you can type a text and see its codes, zero, scale or add features at chosen layers, steer, and watch the next token and the " +
      "continuation change beside the unedited ones. It runs on this machine only."));
  live.concepts ??= (await live.ask("state")).concepts;
  const { given } = live;
  const edits = el("div", { id: "edits" }),
    probabilities = el("div", { id: "next" }),
    codes = el("div", { id: "codes" });
  const python = el("pre", { id: "python" }),
    note = el("span", { class: "soft small", id: "note", role: "status" });
  const outputs = [el("div", { class: "output", id: "unedited" }), el("div", { class: "output", id: "edited" })];
  const prompt = el("textarea", { id: "prompt", "aria-label": "the text", spellcheck: "false" });
  prompt.value = given.text;
  let timer;
  const changed = (all = false) => {
    if (all) fillEdits();
    clearTimeout(timer);
    timer = setTimeout(refresh, 120);
  };
  async function refresh() {
    const own = ++live.turn;
    try {
      const found = await live.ask("next", given);
      if (own !== live.turn) return;
      probabilities.replaceChildren(nextTable(found.tokens), ...(found.vector ? [] : [el(
        "p", { class: "soft small" },
        "Without the concept, whose vector is fitted when a text is written.")]));
      python.textContent = found.python;
    } catch (error) { if (own === live.turn) probabilities.replaceChildren(el("div", { class: "problem" }, error
        .message)); }
  }

  function fillEdits() {
    edits.replaceChildren(...(given.edits.length ? given.edits.map(edit => editRow(edit, changed)) :
      [el("p", { class: "soft small" }, "None yet: open a feature, or name one here.")]));
  }
  async function read() {
    try {
      const found = await live.ask("codes", { text: given.text });
      codes.replaceChildren(reader(Uint32Array.from(found.tokens), async (layer, at) => found.layers[layer][at]
        .sort((a, b) => b[1] - a[1]), null, found.tokens.length - 1));
    } catch (error) { codes.replaceChildren(el("div", { class: "problem" }, error.message)); }
  }
  prompt.addEventListener("input", () => { given.text = prompt.value;
    changed();
    clearTimeout(read.timer);
    read.timer = setTimeout(read, 300); });
  const value = (name, title, low, high, step) => el("label", {}, title, el("input", {
    type: "number",
    min: low,
    max: high,
    step,
    value: given[name],
    id: `set-${name}`,
    onchange: event => { given[name] = Math.max(low, Math.min(high, Number(event.target.value) || 0));
      event.target.value = given[name];
      changed(); }
  }));
  const buttons = {
    changed,
    start: el("button", { type: "button", class: "main", id: "write", onclick: () => generate(outputs, note,
        buttons) }, "Write both"),
    stop: el("button", { type: "button", id: "stop", disabled: true, onclick: () => live.ask("stop").catch(() =>
        live.running?.abort()) }, "Stop")
  };
  const alpha = el("input", {
    type: "range",
    id: "alpha",
    min: -2,
    max: 3,
    step: 0.05,
    value: given.alpha,
    "aria-label": "how strongly",
    oninput: event => { given.alpha = Number(event.target.value);
      shown.textContent = given.alpha.toFixed(2);
      changed(); }
  });
  const shown = el("span", { class: "mono" }, given.alpha.toFixed(2));
  const name = el("input", { id: "feature-name", placeholder: "2:1234+",
  size: 10, "aria-label": "a feature to edit" });
  fillEdits();
  refresh();
  read();
  return el("div", {}, el("h1", {}, "Live"),
    el("h2", {}, "Text"), prompt,
    el("h2", {}, "Edits"), edits,
    el("form", {
      class: "controls",
      onsubmit: event => {
        event.preventDefault();
        const feature = parseName(name.value);
        if (!feature) { note.textContent = `${name.value} is no feature of this source`; return; }
        given.edits.push({ feature: nameOf(feature.layer, feature.id), layers: [feature.layer], kind: "add",
          amount: 4 });
        name.value = "";
        changed(true);
      }
    }, name, el("button", {}, "edit it")),
    live.concepts.length ? el("div", { class: "controls" }, el("label", {}, "steer towards", el(
      "select", { id: "concept", onchange: event => { given.concept = event.target.value;
          changed(); } },
      el("option", { value: "" }, "nothing"), live.concepts.map(concept => el("option", { value: concept,
        selected: concept === given.concept }, concept)))), el("label", {}, "alpha", alpha), shown) : null,
    el("h2", {}, "The next token"), probabilities,
    el("h2", {}, "What it writes"),
    el("div", { class: "controls" }, buttons.start, buttons.stop, value("tokens", "tokens", 1, 1024, 1), value(
      "temperature", "temperature", 0, 10, 0.1), value("seed", "seed", 0, 2 ** 31, 1), note),
    el("div", { class: "halves" }, el("div", {}, el("h3", {}, "unedited"), outputs[0]), el("div", {}, el(
      "h3", {}, "edited"), outputs[1])),
    el("h2", {}, "The same in Python"), python,
    el("button", {
      type: "button",
      class: "quiet",
      id: "copy",
      onclick: async event => {
        try { await navigator.clipboard.writeText(python.textContent);
          event.target.textContent = "copied"; } catch { getSelection().selectAllChildren(python);
          event.target.textContent = "selected: copy it by the keyboard"; }
      }
    }, "copy"),
    el("h2", {}, "Its code"), codes);
};