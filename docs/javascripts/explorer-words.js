// What the explorers say: a name, then the phrase in every language that the pages have.
"use strict";

const ExplorerWords = {
  value: { en: "Number", zh: "数" },
  valueHint: { en: "such as 0.1, -3e-8, 2^-24, 1/3, inf", zh: "例如 0.1、-3e-8、2^-24、1/3、inf" },
  notANumber: { en: "This is no number.", zh: "这不是一个数。" },
  magnitude: { en: "Magnitude, as a power of two", zh: "大小（2 的幂）" },
  format: { en: "Format", zh: "格式" },
  largest: { en: "Largest magnitude in the block, as a power of two", zh: "块内最大的绝对值（2 的幂）" },
  sign: { en: "sign", zh: "符号" },
  exponent: { en: "exponent", zh: "指数" },
  mantissa: { en: "mantissa", zh: "尾数" },
  bits: { en: "Bits", zh: "二进制位" },
  bitsOfElement: { en: "Bits of the element", zh: "元素的二进制位" },
  scale: { en: "Scale of the block", zh: "块的缩放因子" },
  stored: { en: "Stored", zh: "存成" },
  error: { en: "Rounding error", zh: "舍入误差" },
  relative: { en: "Relative error", zh: "相对误差" },
  gap: { en: "Gap to the next number", zh: "到下一个数的间距" },
  below: { en: "Next number below", zh: "下面相邻的数" },
  above: { en: "Next number above", zh: "上面相邻的数" },
  line: {
    en: "Number line around {value}: {format} has {count} numbers here, and rounds to {stored}. Drag the point, or use the arrow keys.",
    zh: "{value} 附近的数轴：{format} 在这里有 {count} 个数，舍入为 {stored}。可以拖动圆点，也可以用方向键。",
  },
  every: { en: "The same number in every format", zh: "同一个数在各种格式里" },
  update: { en: "Update to add", zh: "要加上的更新量" },
  add: { en: "Add once", zh: "加一次" },
  addMany: { en: "Add 100 times", zh: "加 100 次" },
  reset: { en: "Start again", zh: "重新开始" },
  start: { en: "{format}: the weight is {weight}.", zh: "{format}：权重是 {weight}。" },
  lost: {
    en: "{format}: after {times} updates the weight is {weight}. {lost} of them were lost: they did not move it. Exact: {exact}.",
    zh: "{format}：加了 {times} 次之后，权重是 {weight}。其中 {lost} 次更新丢失，权重没有变化。精确值：{exact}。",
  },
  batch: { en: "Gradients of", zh: "梯度来自" },
  tokens: { en: "{tokens} tokens a batch", zh: "每批 {tokens} 个 token" },
  lossScale: { en: "Loss scale", zh: "损失缩放因子" },
  zero: { en: "become 0", zh: "变成 0" },
  subnormal: { en: "subnormal: fewer bits", zh: "次正规数：有效位变少" },
  normal: { en: "held in full", zh: "完整保留" },
  overflow: { en: "overflow", zh: "上溢" },
  histogram: {
    en: "Histogram of {tokens} tokens' activation gradients by power of two, times the loss scale {scale}: {zero} become 0 in {format}, {subnormal} are subnormal, {overflow} overflow.",
    zh: "激活梯度按 2 的幂统计的直方图（{tokens} 个 token，损失缩放因子 {scale}）：在 {format} 里有 {zero} 变成 0，{subnormal} 是次正规数，{overflow} 上溢。",
  },
  axis: { en: "Magnitude of the scaled gradient, as a power of two", zh: "缩放后梯度的大小（2 的幂）" },
  verdictZero: { en: "{zero} of the gradients are lost. A larger scale brings them back.", zh: "{zero} 的梯度丢失。更大的缩放因子能把它们找回来。" },
  verdictOver: { en: "The largest gradient of a weight overflows: this step would be skipped, and the scale halved.", zh: "最大的权重梯度上溢：这一步会被跳过，缩放因子减半。" },
  verdictGood: { en: "Less than 0.1% is lost, and nothing overflows.", zh: "丢失的不到 0.1%，也没有上溢。" },
};

const Explorer = (() => {
  const language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";

  const say = (name, values = {}) =>
    ExplorerWords[name][language].replace(/\{(\w+)\}/g, (_, key) => values[key]);

  // An element with attributes and children; text is a child, too.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "rect", "line", "circle", "text", "path", "g", "title"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  let labels = 0;
  function field(text, input) {
    input.id = `explorer-${(labels += 1)}`;
    return make("p", { class: "explorer-field" }, make("label", { for: input.id }, text), input);
  }

  function choice(text, options, chosen, change) {
    const select = make("select", { onchange: () => change(select.value) },
      ...options.map(([value, shown]) => make("option", { value, ...(value === chosen ? { selected: "" } : {}) }, shown)));
    return field(text, select);
  }

  // "0.1", "2^-24", "1/3", "-inf" as a number; null for anything else.
  function read(text) {
    const word = text.trim().toLowerCase().replace(/−/g, "-").replace("**", "^");
    const plain = (part) => (/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(part) ? Number(part) : null);
    if (/^[+-]?inf(inity)?$/.test(word)) return word.startsWith("-") ? -Infinity : Infinity;
    const parts = word.match(/^([+-]?)([^^/]+)([\^/])([^^/]+)$/);
    if (!parts) return plain(word);
    const [a, b] = [plain(parts[2]), plain(parts[4])];
    if (a === null || b === null) return null;
    const found = (parts[3] === "^" ? a ** b : a / b) * (parts[1] === "-" ? -1 : 1);
    return Number.isNaN(found) ? null : found;
  }

  // A number as people read it: powers of two as such where decimals would be long.
  function show(x, digits = 9) {
    if (Number.isNaN(x)) return "NaN";
    if (!Number.isFinite(x)) return x < 0 ? "-inf" : "inf";
    if (x !== 0 && (Math.abs(x) < 1e-4 || Math.abs(x) > 1e6)) {
      const exponent = Formats.exponentOf(x);
      if (Math.abs(x) === 2 ** exponent) return `${x < 0 ? "-" : ""}2^${exponent}`;
      return x.toExponential(Math.min(digits - 1, 6)).replace(/\.?0+e/, "e");
    }
    return Object.is(x, -0) ? "-0" : String(Number(x.toPrecision(digits)));
  }

  const percent = (share) =>
    share === 0 ? "0%" : share < 0.0001 ? "<0.01%" : `${(100 * share).toFixed(share < 0.01 ? 2 : 1)}%`;

  return { say, make, field, choice, read, show, percent };
})();
