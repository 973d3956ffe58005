// Where we are: the address (#...) says which view. Keys, search, light and dark.

function route(hash) { // [view, what it is given, tab]
  const [rawPath, ...rest] = hash.replace(/^#/, "").split("?");
  let path = "";
  try { path = decodeURIComponent(rawPath); } catch { /* an address that is none shows the overview */ }
  const feature = parseName(path), text = /^text(?:\/(\d{1,9}))?(?:@(\d{1,9}))?$/.exec(path);
  if (feature) return ["feature", feature, "features"];
  if (text) return ["text", { number: text[1], at: text[2] }, "texts"];
  const name = ["overview", "features", "texts", "live"].includes(path) ? path : "overview";
  return [name, new URLSearchParams(rest.join("?")), name];
}

let turn = 0;
async function show() {
  const own = ++turn, main = document.getElementById("main"), [name, given, tab] = route(location.hash);
  document.querySelector("nav [aria-current]")?.removeAttribute("aria-current");
  document.querySelector(`nav [data-view=${tab}]`).setAttribute("aria-current", "page");
  const late = setTimeout(() => main.setAttribute("aria-busy", "true"), 150);
  let content;
  try {
    content = await views[name](given);
  } catch (error) {
    content = problem(error.message);
  }
  clearTimeout(late);
  if (own !== turn) return;
  main.removeAttribute("aria-busy");
  main.replaceChildren(content);
  document.getElementById("query").value = name === "features" ? given.get("q") || "" : "";
  window.scrollTo(0, 0);
  if (name === "features") choose(list.names.indexOf(list.last));
  document.title = name === "feature" ? `${nameOf(given.layer, given.id)} – ${about.title}` : about.title;
  main.dataset.shown = location.hash; // for tests: which address is on the screen
}

// Keys

const STEPS = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1 };
const isTyping = target => ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName);

const KEYS = { // of a view: function of (key, step, target); true if the key was for it
  features(key, step, target) {
    if (key === "ArrowUp" || key === "ArrowDown") choose(list.at + step);
    else if (key === "Enter" && list.names[list.at] && !["A", "BUTTON"].includes(target.tagName)) {
      location.hash = list.names[list.at];
    } else return false;
    return true;
  },
  feature(key, step) {
    const at = list.names.indexOf(list.last);
    if (key === "Escape") location.hash = list.back || "features";
    else if ((key === "ArrowLeft" || key === "ArrowRight") && at >= 0 && list.names[at + step]) {
      location.hash = list.names[at + step];
    } else return false;
    return true;
  },
  text(key, step) {
    if (key === "Escape") location.hash = "texts";
    else return KEYS.live(key, step);
    return true;
  },
  live(key, step) {
    if (!step || !document.getElementById("document")) return false;
    reader.step(step);
    return true;
  },
};

document.addEventListener("keydown", event => {
  const { key, target } = event, query = document.getElementById("query");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (isTyping(target)) {
    if (key === "Escape") target.blur();
    return;
  }
  if (key === "/") {
    query.focus();
    query.select();
  } else if (!KEYS[route(location.hash)[0]]?.(key, STEPS[key], target)) return;
  event.preventDefault();
});

document.getElementById("search").addEventListener("submit", event => {
  event.preventDefault();
  const query = document.getElementById("query"), [name, given] = route(location.hash);
  const feature = parseName(query.value), kept = name === "features" ? Object.fromEntries(given) : {};
  query.blur();
  location.hash = feature ? nameOf(feature.layer, feature.id) :
    `features?${new URLSearchParams({ ...kept, q: query.value.trim(), n: PAGE })}`;
});

// Light and dark

const THEMES = ["auto", "light", "dark"], theme = document.getElementById("theme");

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = name;
}

theme.addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(theme.textContent) + 1) % THEMES.length]);
  try { localStorage.setItem("theme", theme.textContent); } catch { /* a browser may keep nothing for files */ }
});
try {
  const kept = localStorage.getItem("theme");
  if (THEMES.includes(kept)) setTheme(kept);
} catch { /* as above */ }

document.getElementById("name").textContent = about.name;
document.getElementById("foot").textContent = `${about.checkpoint}, step ${whole(about.step)}, ` +
  `commit ${about.made.commit ?? "unknown"}, torch ${about.made.torch}. Written by ${COMMAND}.`;
window.addEventListener("hashchange", show);
document.addEventListener("DOMContentLoaded", show);
