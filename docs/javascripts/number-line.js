// The number line: a number in every format, with its bits, its neighbours, and updates that are lost.
"use strict";

(() => {
  const root = document.getElementById("number-line");
  if (!root) return;
  const { say, make, field, choice, read, show } = Explorer;
  const names = [...Formats.FORMATS, ...Formats.BLOCKS].map((one) => one.name);
  const state = { value: 0.1, format: "bf16", largest: 0, update: 0.001, weight: null, exact: 0, times: 0, lost: 0 };

  // What a format makes of a number: a plain one, or a block format whose block has a largest magnitude.
  function held(name, x, largest) {
    const plain = Formats.byName[name];
    if (plain) {
      const value = Formats.round(plain, x);
      return { element: plain, code: value, value, by: 1, around: Formats.neighbours(plain, x) };
    }
    const form = Formats.BLOCKS.find((one) => one.name === name);
    const top = Math.max(Math.abs(x), 2 ** largest);
    const by = Formats.scales(form, Number.isFinite(top) ? top : Formats.byName.fp32.max);
    const { code, value } = Formats.inBlock(form, x, by);
    const factor = by.decode * by.outer;
    const around = Formats.neighbours(form.element, x / factor).map((one) => one * factor);
    return { element: form.element, code, value, by: factor, around, stored: by.stored };
  }

  const now = (name = state.format) => held(name, state.value, state.largest);

  function bits(element, code) {
    const [sign, exponent, mantissa] = Formats.bitsOf(element, code);
    const parts = [
      ["sign", sign, 1], ["exponent", exponent, element.exponentBits], ["mantissa", mantissa, element.mantissaBits],
    ].map(([kind, field_, width]) => [kind, field_.toString(2).padStart(width, "0")]);
    const label = parts.map(([kind, word]) => `${say(kind)} ${word}`).join(", ");
    return make("span", { class: "explorer-bits", role: "img", "aria-label": label },
      ...parts.map(([kind, word]) =>
        make("span", { class: `explorer-${kind}`, "aria-hidden": "true", title: say(kind) },
          ...[...word].map((bit) => make("span", {}, bit)))));
  }

  // ---- the line: the numbers of the format around the value

  const WIDTH = 640;
  const line = make("svg", { viewBox: `0 -12 ${WIDTH} 108`, class: "explorer-line", role: "slider", tabindex: "0", "aria-valuemin": "-1", "aria-valuemax": "1" });
  let window_ = { from: 0, to: 1 };

  function numbersIn(name, from, to) {
    const form = now(name);
    const found = [];
    let x = from / form.by;
    for (let count = 0; count < 40; count += 1) {
      x = Formats.neighbours(form.element, x)[1];
      if (!(x * form.by <= to)) break;
      found.push(x * form.by);
    }
    return found;
  }

  function drawLine() {
    const form = now();
    const finite = Number.isFinite(state.value);
    const centre = Number.isFinite(form.value) ? form.value : Math.sign(state.value) * form.element.max * form.by;
    const around = Math.max(finite && Math.abs(state.value) > Math.abs(centre) ? Math.abs(state.value - centre) : 0,
      Formats.gap(form.element, Math.min(Math.abs(centre / form.by), form.element.max)) * form.by);
    if (!line.dragging) window_ = { from: centre - 3.6 * around, to: centre + 3.6 * around };
    const at = (x) => 20 + ((x - window_.from) / (window_.to - window_.from)) * (WIDTH - 40);
    const numbers = numbersIn(state.format, window_.from, window_.to);
    const label = say("line", { value: show(state.value), format: state.format, count: numbers.length, stored: show(form.value) });
    line.replaceChildren(
      make("title", {}, label),
      make("line", { x1: 0, x2: WIDTH, y1: 56, y2: 56, class: "explorer-axis" }),
      ...numbers.flatMap((x, i) => [
        make("line", { x1: at(x), x2: at(x), y1: 46, y2: 66, class: x === form.value ? "explorer-chosen" : "explorer-tick" }),
        ...(numbers.length <= 9 && i % 2 === numbers.indexOf(form.value) % 2 || x === form.value
          ? [make("text", { x: at(x), y: 86, "text-anchor": "middle" }, show(x, 6))] : []),
      ]),
      ...(finite && at(state.value) >= 0 && at(state.value) <= WIDTH ? [
        make("path", { d: `M ${at(state.value)} 26 L ${Math.max(0, Math.min(WIDTH, at(form.value)))} 46`, class: "explorer-arrow" }),
        make("circle", { cx: at(state.value), cy: 26, r: 9, class: "explorer-value" }),
        make("text", { x: Math.max(40, Math.min(WIDTH - 40, at(state.value))), y: 12, "text-anchor": "middle" }, show(state.value, 7)),
      ] : []));
    line.setAttribute("aria-label", label);
    line.setAttribute("aria-valuenow", String(Math.sign(state.value) || 0));
    line.setAttribute("aria-valuetext", show(state.value));
  }

  function drag(event) {
    const box = line.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * WIDTH - 20) / (WIDTH - 40);
    set(window_.from + Math.max(0, Math.min(1, share)) * (window_.to - window_.from));
  }
  line.addEventListener("pointerdown", (event) => {
    line.setPointerCapture(event.pointerId);
    line.dragging = true;
    drag(event);
  });
  line.addEventListener("pointermove", (event) => line.dragging && drag(event));
  for (const end of ["pointerup", "pointercancel"]) {
    line.addEventListener(end, () => {
      line.dragging = false;
      draw();
    });
  }
  line.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
    if (!steps) return;
    event.preventDefault();
    set(state.value + (steps * (window_.to - window_.from)) / 72);
  });

  // ---- the fields

  const text = make("input", { type: "text", inputmode: "text", autocomplete: "off", spellcheck: "false", "aria-describedby": "number-line-hint", oninput: () => {
    const found = read(text.value);
    text.setAttribute("aria-invalid", String(found === null));
    hint.textContent = found === null ? say("notANumber") : say("valueHint");
    if (found !== null) set(found, text);
  } });
  const hint = make("small", { id: "number-line-hint", role: "status" }, say("valueHint"));
  const slider = make("input", { type: "range", min: -50, max: 20, step: 0.01, oninput: () =>
    set((state.value < 0 ? -1 : 1) * 2 ** Number(slider.value), slider) });
  const largest = make("input", { type: "range", min: -20, max: 20, step: 1, oninput: () => {
    state.largest = Number(largest.value);
    restart();
  } });
  const largestField = field(say("largest"), largest);
  const update = make("input", { type: "text", autocomplete: "off", spellcheck: "false", value: "0.001", oninput: () => {
    const found = read(update.value);
    update.setAttribute("aria-invalid", String(found === null));
    if (found !== null) {
      state.update = found;
      restart();
    }
  } });

  function set(value, from) {
    state.value = value;
    if (from !== text) {
      text.value = show(value, 12);
      text.setAttribute("aria-invalid", "false");
      hint.textContent = say("valueHint");
    }
    if (from !== slider && value !== 0 && Number.isFinite(value)) slider.value = String(Math.log2(Math.abs(value)));
    slider.setAttribute("aria-valuetext", show(value));
    restart();
  }

  // ---- updates

  function restart() {
    Object.assign(state, { weight: null, times: 0, lost: 0 });
    draw();
  }

  function add(count) {
    if (state.weight === null) {
      state.weight = now().value;
      state.exact = state.weight;
    }
    for (let i = 0; i < count; i += 1) {
      const next = held(state.format, state.weight + state.update, state.largest).value;
      state.lost += Object.is(next, state.weight) && state.update !== 0 ? 1 : 0;
      state.weight = next;
      state.exact += state.update;
      state.times += 1;
    }
    draw();
  }

  // ---- what is shown

  const facts = make("dl", { class: "explorer-facts" });
  const all = make("table", {});
  const result = make("p", { class: "explorer-result", role: "status" });

  function relative(value) {
    const error = value - state.value;
    return error === 0 ? "0" : Number.isFinite(error) && state.value ? show(Math.abs(error / state.value), 3) : "-";
  }

  function error(value) {
    return Object.is(value, state.value) ? "0" : Number.isFinite(value - state.value) ? show(value - state.value, 4) : "-";
  }

  function draw() {
    const form = now();
    const block = !Formats.byName[state.format];
    largestField.hidden = !block;
    largest.setAttribute("aria-valuetext", `2^${state.largest}`);
    const shown = [
      [say(block ? "bitsOfElement" : "bits"), bits(form.element, form.code)],
      ...(block ? [[say("scale"), show(form.by)]] : []),
      [say("stored"), show(form.value, 12)],
      [say("error"), error(form.value)],
      [say("below"), show(form.around[0], 12)],
      [say("above"), show(form.around[1], 12)],
      [say("gap"), Number.isFinite(form.value) ? show(Formats.gap(form.element, Math.min(Math.abs(form.value / form.by), form.element.max)) * form.by) : "-"],
    ];
    facts.replaceChildren(...shown.flatMap(([term, found]) => [make("dt", {}, term), make("dd", {}, found)]));
    const head = ["format", "bits", "stored", "relative"].map((name) => make("th", { scope: "col" }, say(name)));
    const rows = names.map((name) => {
      const one = now(name);
      return make("tr", name === state.format ? { class: "explorer-row" } : {},
        make("th", { scope: "row" }, name), make("td", {}, bits(one.element, one.code)),
        make("td", {}, show(one.value)), make("td", {}, relative(one.value)));
    });
    all.replaceChildren(make("caption", {}, say("every")), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
    result.textContent = say(state.times ? "lost" : "start", {
      format: state.format, weight: show(state.weight ?? form.value), times: state.times, lost: state.lost, exact: show(state.exact),
    });
    drawLine();
  }

  root.replaceChildren(
    field(say("value"), text), hint,
    field(say("magnitude"), slider),
    choice(say("format"), names.map((name) => [name, name]), state.format, (name) => {
      state.format = name;
      restart();
    }),
    largestField, line, facts,
    make("div", { class: "explorer-updates" },
      field(say("update"), update),
      make("p", {},
        make("button", { type: "button", class: "md-button", onclick: () => add(1) }, say("add")), " ",
        make("button", { type: "button", class: "md-button", onclick: () => add(100) }, say("addMany")), " ",
        make("button", { type: "button", class: "md-button", onclick: restart }, say("reset"))),
      result),
    make("div", { class: "md-typeset__scrollwrap" }, make("div", { class: "md-typeset__table" }, all)));
  set(state.value);
})();
