views.live = async () => el("div", {}, el("h1", {}, "Live"), el("p", {}, "not yet"));
const live = { controls: () => null, effect: () => null };
