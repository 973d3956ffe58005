// The overview: what the model is, which features stand best for something, how often they fire, what the code costs.

const CLASSES = ["never", ...about.edges.map(edge => `<10^${Math.round(Math.log10(edge))}`), "more"];
const SIGNED = about.kind !== "sae"; // an SAE's features have one sign only

function spread(figures) {
  const most = Math.max(...figures.histogram);
  const bars = figures.histogram.map((count, at) => {
    const bar = el("i", { title: `${CLASSES[at]}: ${whole(count)} features` });
    bar.style.height = `${count ? Math.max(2, 24 * Math.sqrt(count / most)) : 0}px`;
    return bar;
  });
  const said = figures.histogram.map((count, at) => `${CLASSES[at]}: ${count}`).join(", ");
  return el("span", { class: "spread", role: "img", "aria-label": said }, bars);
}

function worldNote() {
  const world = about.toy ?
    "The text is a toy world: a few dozen kinds of sentence about 32 topics, people, jobs, towns and years, written " +
    "by a program, so that it is known of every token what it stands for. It is no evidence about language." :
    "What is known of the tokens of this text is only what needs no tagger: their form, short lists of words, and " +
    "where sentences begin.";
  const control = about.kind === "hash" ?
    "This page shows the control itself: an untrained bottleneck on randomly rotated activations. What its features " +
    "seem to stand for is what chance gives." :
    "A label means nothing by itself: an untrained hash of the same activations finds some, too. So beside every " +
    "score stands the hash's, chosen and tested in the same way, and it decides.";
  return el("div", { class: "note" }, el("p", {}, world), el("p", {}, control));
}

function lossTable() {
  const { loss, rows } = about.losses;
  const value = number => [number.toFixed(4),
    number !== loss && el("span", { class: "soft small delta" }, signed(number - loss))];
  const body = rows.map((row, at) => el("tr", { class: at === rows.length - 1 ? "sum" : "" },
    cell(at < rows.length - 1 ? about.layers[at] : "all", "text"),
    [row.code, row.h, row.zero].map(number => cell(value(number)))));
  const meaning = about.kind === "own" ?
    "y = h lets the whole input of a bottleneck through, so it shows what the sparse code costs; " :
    "y = code puts in what the source reconstructs, so it shows what that loses; y = h is the model as it is; ";
  return [table([["layer", "text"], "y = code", "y = h", "y = 0"], body),
    soft(`Nats per token, and the difference to the model as it is (${loss.toFixed(4)}). ${meaning}` +
      `y = 0 lets nothing through. In this layer alone, or in all; ${about.losses.what}.`)];
}

function levelTable() {
  const { explained } = about.losses;
  const heads = [["layer", "text"], ["level", "text"], "features", "never fire", "L0",
    ...(explained ? [["explained", "narrow"]] : []), ["rates", "text"]];
  const body = about.levels.flatMap((levels, at) => levels.map((figures, level) => el("tr", {},
    cell(level ? "" : about.layers[at], "text"), cell(level, "text"), cell(whole(figures.features)),
    cell(percent(figures.dead, 2)), cell(figures.l0.toFixed(2)),
    explained && cell(fixed(explained[at][level], 3), "narrow"), cell(spread(figures), "text"))));
  return [table(heads, body),
    soft(`Of ${whole(about.tokens)} tokens. L0: features active on a token. The bars: features that fire on ` +
      `${CLASSES.join(", ")} of all tokens, their number on a square-root scale; the first are dead.` +
      (explained ? " Variance is explained by a level and those before it." : ""))];
}

function rankingTable() {
  const { rows, tokens } = about.ranking;
  if (!rows.length) return soft("There are too few tokens to choose and test features for any label.");
  const heads = [["feature", "text"], ["label", "text"], ["chosen", "narrow"], "unseen", "hash",
    ["unseen, and the hash's", "text narrow"]];
  const body = rows.map(([name, label, chosen, unseen, control], at) => el("tr", { hidden: at >= 12 },
    cell(el("a", { href: `#${name}`, class: "mono" }, name), "text"), cell(label, "text"),
    cell(chosen.toFixed(2), "narrow"), cell(el("b", {}, unseen.toFixed(2))), cell(control.toFixed(2)),
    cell([meter(unseen), meter(control, "ghost")], "grow narrow")));
  const more = rows.length > 12 && button(`all ${whole(rows.length)}`, event => {
    body.forEach(row => { row.hidden = false; });
    event.target.remove();
  });
  const good = rows.filter(row => row[3] >= 0.5).length;
  const every = about.m * about.layers.length * (SIGNED ? 2 : 1);
  return [table(heads, body, "full"), more,
    soft(`The rule of sample.py --top-features, on ${whole(tokens)} tokens: for each label with at least 100 tokens ` +
      "in each half of its words, the feature with the best F1 on one half; of these the best by that F1 (chosen). " +
      "Unseen is its F1 on the other half of the words, which chose nothing; hash that of the control's feature " +
      `chosen in the same way. ${whole(good)} features of ${whole(every)} are such a choice with at least 0.50 on ` +
      "unseen words: most stand for nothing that has a name here.")];
}

function waysAround() {
  const key = name => el("kbd", {}, name);
  return [
    el("p", {}, el("a", { href: "#features" }, "All features"), " in a table that can be sorted and searched, by " +
      "token, text or /regular expression/; ", el("a", { href: "#texts" }, "texts"), " with the features of every " +
      "token; ", LIVE ? [el("a", { href: "#live" }, "live"), ": type a text, edit features, steer."] :
      [el("span", { class: "mono" }, `${COMMAND} --serve`), " adds typing, editing and steering."]),
    soft(key("/"), " search, ", key("↑"), " ", key("↓"), " a row of the table, ", key("←"), " ", key("→"),
      " the feature or token before and after, ", key("Enter"), " open, ", key("Esc"), " back to the list. A " +
      "feature's address is #layer:index and its sign, as in #2:1234+: it can be kept, and sent.")];
}

views.overview = async () => {
  const figures = about.levels.flat(), total = sum(figures.map(f => f.features));
  const dead = sum(figures.map(f => f.dead * f.features)) / total;
  const { shape } = about, { loss, rows } = about.losses, last = rows.at(-1), own = about.kind === "own";
  const kind = shape.bottleneck === "none" ? "A dense model" : `A model with ${shape.bottleneck} bottlenecks`;
  return el("div", {}, el("h1", {}, about.title),
    el("p", { class: "soft" }, `${kind}: ${shape.layers} layers, width ${shape.d}, ${whole(about.parameters)} ` +
      `parameters, step ${whole(about.step)}, trained on ${about.data}. ` +
      `${own ? "Its own features" : `The source ${about.source}`}, where they fire in ${whole(about.tokens)} ` +
      "validation tokens."),
    el("div", { class: "cards" },
      card(whole(total), `features in ${about.layers.length} layers${SIGNED ? ", each with two signs" : ""}`),
      card(whole(about.firings), "firings"),
      card(percent(dead, 2), "never fire"),
      card(loss.toFixed(4), "validation loss"),
      card(signed(last[own ? "h" : "code"] - loss), own ? "loss with y = h in all layers" :
        "loss through the code, all layers"),
      card(signed(last.zero - loss), "loss with y = 0 in all layers")),
    el("div", { class: "two" },
      el("section", {}, el("h2", {}, "Features that stand best for something"), rankingTable()),
      el("section", {}, el("h2", {}, "How to read it"), worldNote(), waysAround())),
    el("div", { class: "halves" },
      el("section", {}, el("h2", {}, "Layers and levels"), levelTable()),
      el("section", {}, el("h2", {}, "What the code costs"), lossTable())));
};
