// The loss scale: a histogram of gradients that slides through the range of a format.
"use strict";

(() => {
  const root = document.getElementById("loss-scale");
  if (!root) return;
  const { say, make, field, choice, percent } = Explorer;
  const { histogram, tokens, overflow } = JSON.parse(document.getElementById("gradients.json").textContent).data;
  const batches = Object.keys(histogram);
  const state = { batch: batches[batches.length - 1], format: "fp16", scale: 0 };

  const LOW = -64, HIGH = 24, WIDTH = 640, HEIGHT = 234, BASE = 180;
  const picture = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "explorer-histogram", role: "img" });
  const table = make("table", {});
  const verdict = make("p", { class: "explorer-result", role: "status" });
  const output = make("output", {});
  const slider = make("input", { type: "range", min: 0, max: 24, step: 1, value: 0, oninput: () => {
    state.scale = Number(slider.value);
    draw();
  } });

  const at = (exponent) => ((exponent - LOW) / (HIGH - LOW)) * WIDTH;

  // What becomes of most numbers of a power of two.
  function kindOf(form, exponent) {
    const found = Formats.shares(form, { [exponent]: 1 }, 0);
    return Object.keys(found).reduce((a, b) => (found[b] > found[a] ? b : a));
  }

  // The experiment also says from which scale on a gradient of a weight, which are larger, exceeds fp16.
  function overflows(form) {
    const largest = 16 - overflow[state.batch];
    return Formats.shares(form, { [largest]: 1 }, state.scale).overflow > 0.5;
  }

  function draw() {
    const form = Formats.byName[state.format];
    const counts = histogram[state.batch];
    const most = Math.max(...Object.values(counts));
    const found = Formats.shares(form, counts, state.scale);
    const shown = Object.fromEntries(Object.entries(found).map(([kind, share]) => [kind, percent(share)]));
    const label = say("histogram", { ...shown, tokens: tokens[state.batch], scale: `2^${state.scale}`, format: state.format });
    const limits = [Math.log2(form.minSubnormal) - 1, Math.log2(form.minNormal), Math.log2(form.max)];
    picture.replaceChildren(
      make("title", {}, label),
      ...Object.entries(counts).map(([exponent, count]) => {
        const e = Number(exponent) + state.scale;
        const height = (count / most) * (BASE - 20);
        return make("rect", { x: at(e) + 0.5, y: BASE - height, width: WIDTH / (HIGH - LOW) - 1, height, class: `explorer-${kindOf(form, e)}` });
      }),
      make("line", { x1: 0, x2: WIDTH, y1: BASE, y2: BASE, class: "explorer-axis" }),
      ...limits.filter((e) => e > LOW && e < HIGH).map((e) =>
        make("line", { x1: at(e), x2: at(e), y1: 10, y2: BASE, class: "explorer-limit" })),
      ...[-60, -48, -36, -24, -12, 0, 12].map((e) =>
        make("text", { x: at(e), y: BASE + 20, "text-anchor": "middle", ...(e % 24 ? { class: "explorer-minor" } : {}) }, `2^${e}`)),
      make("text", { x: WIDTH / 2, y: HEIGHT - 8, "text-anchor": "middle" }, say("axis")));
    picture.setAttribute("aria-label", label);
    output.textContent = `2^${state.scale} = ${2 ** state.scale}`;
    slider.setAttribute("aria-valuetext", `2^${state.scale}`);
    table.replaceChildren(make("tbody", {}, ...Object.keys(found).map((kind) =>
      make("tr", {}, make("th", { scope: "row" }, make("span", { class: `explorer-key explorer-${kind}`, "aria-hidden": "true" }), say(kind)),
        make("td", {}, shown[kind])))));
    verdict.textContent = found.overflow > 0 || overflows(form) ? say("verdictOver") : found.zero >= 0.001 ? say("verdictZero", shown) : say("verdictGood");
  }

  root.replaceChildren(
    choice(say("batch"), batches.map((batch) => [batch, say("tokens", { tokens: tokens[batch] })]), state.batch, (batch) => {
      state.batch = batch;
      draw();
    }),
    choice(say("format"), ["fp16", "bf16", "e5m2", "e4m3fn"].map((name) => [name, name]), state.format, (name) => {
      state.format = name;
      draw();
    }),
    field(say("lossScale"), slider), output,
    picture, make("div", { class: "explorer-shares" }, table), verdict);
  draw();
})();
