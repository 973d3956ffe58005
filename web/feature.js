// The page of a feature: where it fires, what it does, and who fires with it.

const BANDS = ["first", "second", "third", "fourth", "last"];

function contextItem(block, c, peak) {
  const at = block.at[c], first = at - block.left[c], last = Math.min(at + 1 + about.after, words.length);
  const strength = new Array(last - first).fill(0);
  for (let f = block.fire_starts[c]; f < block.fire_starts[c + 1]; f++) {
    strength[block.fire_at[f]] = block.fire_value[f];
  }
  return el("li", { "data-at": at, "data-band": block.band[c] },
    el("a", { class: "value", href: `#text@${at}`, title: "see it in its text" }, strength[at - first].toFixed(2)),
    el("span", { class: "tokens" }, tokenSpans(words.subarray(first, last), strength, at - first, peak)));
}

function contextLists(block, place, peak) {
  const bands = [];
  for (let c = block.starts[place]; c < block.starts[place + 1]; c++) {
    (bands[block.band[c]] ??= []).push(contextItem(block, c, peak));
  }
  return bands.map((items, band) => [
    el("h3", {}, band ? `${BANDS[band - 1]} fifth of its firings by strength` : "where it is strongest"),
    el("ul", { class: "contexts" }, items)]);
}

function histogram(counts, peak, total) {
  const most = Math.max(...counts), width = peak / counts.length;
  const bars = Array.from(counts, (count, at) => {
    const title = `${(at * width).toFixed(2)} to ${((at + 1) * width).toFixed(2)}: ${whole(count)}`;
    const bar = el("i", { title });
    bar.style.height = `${count ? Math.max(1.5, 100 * count / most) : 0}%`;
    return bar;
  });
  const said = `${whole(total)} firings, strengths up to ${peak.toFixed(2)}`;
  return [el("h3", {}, "firings by strength"),
    el("div", { class: "bars", id: "histogram", role: "img", "aria-label": said }, bars),
    el("div", { class: "axis" }, el("span", {}, "0"), el("span", {}, `${whole(most)} in the tallest`),
      el("span", {}, peak.toFixed(2)))];
}

// What it does to the next token

function effectList(title, tokens, values, kind) {
  const most = Math.max(...values, 1e-9);
  const rows = Array.from(tokens, (token, at) => el("tr", {}, cell(tokenPiece(token), "text"), cell(fixed(values[at])),
    cell(meter(values[at] / most, kind), "grow")));
  return el("div", {}, el("h3", {}, title), el("table", { class: "list" }, el("tbody", {}, rows)));
}

function effectsOf(block, place) { // {ups, up, downs, down}, or null where it was not computed
  const row = block.effect_of ? block.effect_of.indexOf(place) : -1;
  if (row < 0) return null;
  const size = block.ups.length / block.effect_of.length;
  const part = name => block[name].subarray(size * row, size * (row + 1));
  if (Number.isNaN(part("up_values")[0])) return null;
  return { ups: part("ups"), up: part("up_values"), downs: part("downs"), down: part("down_values") };
}

function showEffects(effect, count) {
  const several = Math.min(about.effect_at, count);
  return [el("div", { class: "pair" }, effectList("raises", effect.ups, effect.up),
    effectList("lowers", effect.downs, effect.down, "down")),
    soft("Change of the next token's logit by the feature, above the mean of all tokens: " +
      (several > 1 ? `the mean of its ${several} strongest firings.` : "where it fires."))];
}

function effectBox(name, block, place, count) {
  const effect = effectsOf(block, place), every = sum(about.levels.flat().map(f => f.signed));
  const box = el("div", { id: "effects" }, effect ? showEffects(effect, count) :
    soft("What it does to the next token was not computed: ",
      LIVE ? "it is asked for now …" : el("span", { class: "mono" }, `${COMMAND} --effects ${every}`)));
  if (LIVE && !effect) live.effect(name, box, count);
  return box;
}

// Who fires with it

function relatives(title, block, name, place, found, total) {
  const rows = [];
  for (let at = block[`${name}_starts`][place]; at < block[`${name}_starts`][place + 1]; at++) {
    const id = block[`${name}_ids`][at], count = block[`${name}_counts`][at], row = rowOf(found, id);
    rows.push(el("tr", { "data-kind": name }, cell(link(found.layer, id), "text"), cell(whole(count), "soft"),
      cell(percent(count / total, 0)), cell(meter(count / total), "grow"),
      cell(el("span", { class: "soft small" }, labelOf(found, row)), "text cut")));
  }
  return rows.length > 0 && [el("h3", {}, title), el("table", { class: "list" }, el("tbody", {}, rows))];
}

function otherSign(found, id) {
  const other = id < about.m ? id + about.m : id - about.m, row = rowOf(found, other), label = labelOf(found, row);
  return SIGNED && [el("h3", {}, "the other sign"),
    el("p", { id: "other-sign" }, link(found.layer, other), row < 0 ? " never fires." : [
      ` fires on ${percent(found.count[row] / about.tokens, 3)} of all tokens`,
      label && `, best label ${label} (F1 ${fixed(share(found, "f1", row))})`,
      ". It is a feature of its own, strongest on ", topTokens(found, row)])];
}

// The page

function figuresOf(found, row) {
  const count = found.count[row], label = labelOf(found, row), purity = share(found, "purity", row);
  const precision = fixed(share(found, "precision", row)), recall = fixed(share(found, "recall", row));
  return el("div", { class: "cards", id: "figures" },
    card(percent(count / about.tokens, 3), `of tokens: ${whole(count)} of ${whole(about.tokens)}`),
    card(fixed(found.peak[row]), `greatest strength, ${fixed(found.mean[row])} on average`),
    label && card(label, `best label: precision ${precision}, recall ${recall}`),
    label && card(fixed(share(found, "f1", row)), about.control ?
      `F1 of it; the hash's best has ${fixed(controlOf(found, row))}` : "F1 of it"),
    !Number.isNaN(purity) && card(fixed(purity), "purity: its label among the 20 strongest"),
    found.kl?.[row] >= 0 && card(millionths(found.kl[row]), "effect, millionths of a nat"));
}

function titleOf(layer, id) {
  const name = nameOf(layer, id), at = list.names.indexOf(name);
  const neighbour = (text, step, title) => button(text, () => { location.hash = list.names[at + step]; },
    { disabled: at < 0 || !list.names[at + step], title });
  return el("div", { class: "title" }, el("h1", { class: "mono" }, name),
    el("span", { class: "badge" }, `layer ${layer}`),
    about.lows.length > 2 && el("span", { class: "badge" }, `level ${levelOf(id)}`),
    about.kind !== "own" && el("span", { class: "badge" }, about.source),
    el("span", { class: "push" }, neighbour("← before", -1, "the one before it in the table"),
      neighbour("after →", 1, "the one after it in the table")));
}

function rankNotes(name) {
  const own = about.ranking.rows.filter(row => row[0] === name);
  return own.map(([, label, chosen, unseen, control]) => el("p", { class: "note" },
    `Chosen as the best feature for “${label}” on half of its words (F1 ${chosen.toFixed(2)}): on the other half ` +
    `F1 is ${unseen.toFixed(2)}, the hash's ${control.toFixed(2)}.`));
}

views.feature = async ({ layer, id }) => {
  await readWords();
  const found = await tableOf(layer), row = rowOf(found, id), name = nameOf(layer, id);
  list.last = name;
  if (row < 0) {
    return el("div", {}, titleOf(layer, id),
      el("p", {}, `It never fires in these ${whole(about.tokens)} tokens: there is nothing to show.`),
      otherSign(found, id));
  }
  const block = await load(`block-${layer}-${Math.floor(id / about.block)}`), place = id % about.block;
  const count = found.count[row], peak = found.peak[row], bins = block.histogram.length / (block.starts.length - 1);
  return el("div", {}, titleOf(layer, id), figuresOf(found, row), rankNotes(name),
    LIVE && live.controls(layer, id, peak),
    el("div", { class: "two" },
      el("section", { id: "contexts" }, contextLists(block, place, peak)),
      el("section", {},
        histogram(block.histogram.subarray(bins * place, bins * (place + 1)), peak, count),
        effectBox(name, block, place, count),
        relatives("parents that fire with it", block, "parents", place, found, count),
        relatives("children that fire with it", block, "children", place, found, count),
        relatives("features that fire with it", block, "allies", place, found, count),
        soft("Tokens on which both fire, and their share of this feature's. The last list is by cosine, common " +
          "tokens over the root of the product of both counts: a feature that fires everywhere is near to none."),
        otherSign(found, id))));
};
