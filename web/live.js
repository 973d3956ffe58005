// The live parts, where view.py --serve has put a model behind the page.

const live = {
  given: { text: about.toy ? "In 1436, a" : "The", edits: [], concept: "", alpha: 1, tokens: 60, temperature: 0.8,
    seed: 0 }, // what is asked of the server
  page: null, // made once: what was typed and written stays while other views are shown
  asked: 0, // how often the next token was asked for, and a text: only the latest counts
  wanted: 0,
  writing: null, // a promise, while a text is being written

  post(name, content, signal) {
    const headers = { "Content-Type": "application/json" };
    return fetch(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(content), signal });
  },

  async ask(name, content = {}) {
    const answer = await live.post(name, content), found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  },

  async effect(name, box, count) { // of a feature that the page knows none of
    try {
      box.replaceChildren(...showEffects(await live.ask("effect", { feature: name }), count));
    } catch (error) {
      box.replaceChildren(soft(error.message));
    }
  },

  edit(layer, id, kind = "zero", amount = 0) {
    live.given.edits.push({ feature: nameOf(layer, id), layers: [layer], kind, amount });
  },

  controls(layer, id, peak) { // on a feature's page
    const choice = (kind, amount, title) => button(kind, () => {
      live.edit(layer, id, kind, amount);
      location.hash = "live";
    }, { class: "", "data-edit": kind, title });
    return el("div", { class: "controls", id: "edit" },
      el("span", { class: "soft small" }, "Edit it and see what the model writes:"),
      choice("zero", 0, "its coefficient becomes 0 wherever it is active"),
      choice("scale", 2, "its coefficient is multiplied wherever it is active"),
      choice("add", Number(peak.toFixed(1)), "so much of it is added on every token"));
  },
};

// Edits

function editRow(edit, changed, remove) {
  const { layer, id } = parseName(edit.feature);
  const input = more => el("input", { step: 0.1, value: edit.amount, "aria-label": "amount", ...more });
  const number = input({ type: "number" }), slider = input({ type: "range", min: -10, max: 10 });
  const setAmount = event => {
    edit.amount = Number(event.target.value) || 0;
    number.value = slider.value = edit.amount;
    changed();
  };
  number.addEventListener("change", setAmount);
  slider.addEventListener("input", setAmount);
  const setKind = event => {
    edit.kind = event.target.value;
    number.hidden = slider.hidden = edit.kind === "zero";
    changed();
  };
  number.hidden = slider.hidden = edit.kind === "zero";
  const kinds = ["zero", "scale", "add"].map(name => el("option", { selected: name === edit.kind }, name));
  const layers = about.layers.map(number => el("label", {}, el("input", { type: "checkbox",
    checked: edit.layers.includes(number),
    onchange: event => {
      edit.layers = edit.layers.filter(item => item !== number).concat(event.target.checked ? [number] : []);
      changed();
    } }), number));
  return el("div", { class: "edit controls" }, link(layer, id),
    el("select", { "aria-label": "what to do", onchange: setKind }, kinds), number, slider,
    el("span", { class: "controls" }, el("span", { class: "soft small" }, "at layers"), layers),
    button("remove", remove));
}

// The next token

function nextTable(tokens) {
  const most = Math.max(...tokens.flatMap(([, before, after]) => [before, after]), 1e-9);
  const rows = tokens.map(([token, before, after]) => el("tr", { "data-token": token }, cell(tokenPiece(token), "text"),
    cell(percent(before)), cell(percent(after)), cell([meter(before / most, "ghost"), meter(after / most)], "grow")));
  return table([["next token", "text"], "unedited", "edited", ["unedited in grey", "text"]], rows, "full");
}

// Texts, token by token

async function readEvents(answer, onevent) {
  const reading = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reading.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    lines.forEach(line => onevent(JSON.parse(line)));
  }
}

async function write(given, outputs, note) {
  let ended = "the connection ended early";
  outputs.forEach(box => box.replaceChildren(el("span", { class: "given" }, given.text)));
  note.textContent = "writing …";
  try {
    const answer = await live.post("generate", given);
    if (!answer.ok) throw new Error((await answer.json()).error);
    await readEvents(answer, event => {
      if (event.text) outputs[event.side].append(event.text);
      if (event.status) note.textContent = event.status;
      if (event.error) throw new Error(event.error);
      if (event.done) ended = event.stopped ? "stopped" : "done";
    });
    note.textContent = ended;
  } catch (error) {
    note.textContent = error.message;
  }
}

// The view

function setting(name, title, low, high, step, changed) {
  const set = event => {
    live.given[name] = Math.max(low, Math.min(high, Number(event.target.value) || 0));
    event.target.value = live.given[name];
    changed();
  };
  return el("label", {}, title, el("input", { type: "number", min: low, max: high, step, value: live.given[name],
    id: `set-${name}`, onchange: set }));
}

function steering(concepts, changed) {
  const { given } = live, shown = el("span", { class: "mono" }, given.alpha.toFixed(2));
  const slide = event => {
    given.alpha = Number(event.target.value);
    shown.textContent = given.alpha.toFixed(2);
    changed();
  };
  const slider = el("input", { type: "range", id: "alpha", min: -2, max: 3, step: 0.05, value: given.alpha,
    oninput: slide });
  const alpha = el("label", { hidden: !given.concept }, "alpha", slider, shown);
  const pick = event => {
    given.concept = event.target.value;
    alpha.hidden = !given.concept;
    changed();
  };
  const options = ["", ...concepts].map(name =>
    el("option", { value: name, selected: name === given.concept }, name || "nothing"));
  return el("div", { class: "controls" },
    el("label", {}, "steer towards", el("select", { id: "concept", onchange: pick }, options)), alpha);
}

function copyButton(source) {
  return button("copy", async event => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      event.target.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(source);
      event.target.textContent = "selected: copy it by the keyboard";
    }
  }, { id: "copy" });
}

function noModel() {
  return el("div", {}, el("h1", {}, "Live"),
    el("p", {}, "This page was opened from the disk, so that there is no model behind it. With"),
    el("pre", {}, `${COMMAND} --serve`),
    el("p", {}, "you can type a text and see its codes, zero, scale or add features at chosen layers, steer, and " +
      "watch the next token and the continuation change beside the unedited ones. It runs on this machine only."));
}

function livePage(concepts) {
  const { given } = live, timers = {};
  const later = (work, wait) => {
    clearTimeout(timers[work.name]);
    timers[work.name] = setTimeout(work, wait);
  };
  const edits = el("div", { id: "edits" }), next = el("div", { id: "next" }), codes = el("div", { id: "codes" });
  const outputs = ["unedited", "edited"].map(id => el("div", { class: "output", id }));
  const python = el("pre", { id: "python" }), note = el("span", { class: "soft small", id: "note", role: "status" });
  const prompt = el("textarea", { id: "prompt", "aria-label": "the text", spellcheck: "false" }, given.text);
  const follow = el("input", { type: "checkbox", id: "follow" });

  function changed() {
    later(refresh, 120);
    if (follow.checked) later(rewrite, 300);
  }

  async function refresh() { // the next token, and the Python lines
    const own = ++live.asked;
    try {
      const found = await live.ask("next", given);
      if (own !== live.asked) return;
      next.replaceChildren(nextTable(found.tokens),
        found.vector ? "" : soft("Without the concept, whose vector is fitted when a text is written."));
      python.textContent = found.python;
    } catch (error) {
      if (own === live.asked) next.replaceChildren(problem(error.message));
    }
  }

  async function readCodes() {
    try {
      const { tokens, layers } = await live.ask("codes", { text: given.text });
      const codesAt = async (layer, at) => layers[layer][at];
      codes.replaceChildren(reader(tokens, codesAt, tokens.length - 1, { edit: addEdit }));
    } catch (error) {
      codes.replaceChildren(problem(error.message));
    }
  }

  async function rewrite() { // a text of this page that is being written is stopped first
    const own = ++live.wanted;
    if (live.writing) await stop();
    await live.writing;
    if (own !== live.wanted) return;
    await (live.writing = write(structuredClone(given), outputs, note));
    live.writing = null;
    if (given.concept) refresh(); // its vector is known now
  }

  const stop = () => live.ask("stop").catch(error => { note.textContent = error.message; });

  function addEdit(...edit) {
    live.edit(...edit);
    fillEdits();
    changed();
  }

  function fillEdits() {
    const remove = edit => {
      given.edits = given.edits.filter(other => other !== edit);
      fillEdits();
      changed();
    };
    const rows = given.edits.map(edit => editRow(edit, changed, () => remove(edit)));
    edits.replaceChildren(...(rows.length ? rows :
      [soft("None yet: open a feature, choose “edit” beside one below, or name one here.")]));
  }

  function addNamed(event) {
    event.preventDefault();
    const input = event.target.elements.feature, feature = parseName(input.value);
    input.setCustomValidity(feature ? "" : "There is no such feature: layer, index and sign, such as 0:3+");
    if (!event.target.reportValidity()) return;
    addEdit(feature.layer, feature.id, "add", 4);
    input.value = "";
  }

  prompt.addEventListener("input", () => {
    given.text = prompt.value;
    changed();
    later(readCodes, 300);
  });
  const page = el("div", {}, el("h1", {}, "Live"),
    el("div", { class: "two" },
      el("section", {}, el("h2", {}, "Text"), prompt, el("h2", {}, "Edits"), edits,
        el("form", { class: "controls", onsubmit: addNamed },
          el("input", { name: "feature", placeholder: `${about.layers[0]}:3+`, size: 10,
            "aria-label": "a feature to edit", oninput: event => event.target.setCustomValidity("") }),
          el("button", {}, "edit it")),
        concepts.length > 0 && steering(concepts, changed)),
      el("section", {}, el("h2", {}, "The next token"), next)),
    el("h2", {}, "What it writes"),
    el("div", { class: "controls" }, button("Write both", rewrite, { class: "main", id: "write" }),
      button("Stop", stop, { class: "", id: "stop" }), setting("tokens", "tokens", 1, 1024, 1, changed),
      setting("temperature", "temperature", 0, 10, 0.1, changed), setting("seed", "seed", 0, 2 ** 31, 1, changed),
      el("label", {}, follow, "at every change"), note),
    el("div", { class: "halves" }, outputs.map(box => el("div", {}, el("h3", {}, box.id), box))),
    el("h2", {}, "The code of the text"), codes,
    el("h2", {}, "The same in Python"), python, copyButton(python));
  const update = () => [fillEdits(), refresh(), readCodes()];
  return { page, update };
}

views.live = async () => {
  if (!LIVE) return noModel();
  live.page ??= livePage((await live.ask("state")).concepts);
  live.page.update();
  return live.page.page;
};
