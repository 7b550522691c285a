// Number formats, by the definitions of halfstep.formats: what each can hold, and how it rounds.
// Numbers of JavaScript are fp64, which hold every number of every format here, so that nothing is
// rounded twice. Math.fround rounds to fp32. tests/docs/test_explorer.py compares with halfstep.
"use strict";

const Formats = (() => {
  // finiteOnly: no infinity, and only the pattern of all ones is NaN; hasNan: false where there is none.
  const format = (name, exponentBits, mantissaBits, more = {}) => {
    const bias = 2 ** (exponentBits - 1) - 1;
    const eps = 2 ** -mantissaBits;
    const { finiteOnly = false, hasNan = true } = more;
    const minExponent = 1 - bias;
    return {
      name, exponentBits, mantissaBits, finiteOnly, hasNan, bias, eps, minExponent,
      bits: 1 + exponentBits + mantissaBits,
      max: finiteOnly ? (2 - (hasNan ? 2 : 1) * eps) * 2 ** (bias + 1) : (2 - eps) * 2 ** bias,
      minNormal: 2 ** minExponent,
      minSubnormal: 2 ** (minExponent - mantissaBits),
    };
  };

  const FORMATS = [
    format("fp32", 8, 23),
    format("tf32", 8, 10),
    format("bf16", 8, 7),
    format("fp16", 5, 10),
    format("e4m3fn", 4, 3, { finiteOnly: true }),
    format("e5m2", 5, 2),
    format("e2m1", 2, 1, { finiteOnly: true, hasNan: false }),
  ];
  const byName = Object.fromEntries(FORMATS.map((one) => [one.name, one]));

  const words = new DataView(new ArrayBuffer(8));

  // The exponent e of a finite number with 2^e <= |x| < 2^(e+1), exactly; Math.log2 would round.
  function exponentOf(x) {
    words.setFloat64(0, x);
    const field = (words.getUint32(0) >>> 20) & 0x7ff;
    return field ? field - 1023 : exponentOf(x * 2 ** 64) - 64;
  }

  const isNegative = (x) => x < 0 || Object.is(x, -0);
  const signed = (magnitude, x) => (isNegative(x) ? -magnitude : magnitude);

  // The gap between the numbers of a format around x, whose magnitude is at most the largest.
  function gap(form, x) {
    const exponent = x ? Math.max(exponentOf(x), form.minExponent) : form.minExponent;
    return 2 ** (exponent - form.mantissaBits);
  }

  function toEven(steps) {
    const below = Math.floor(steps);
    const rest = steps - below;
    return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
  }

  // Round to nearest, ties to even. Beyond the largest: inf, NaN where there is no infinity, or the
  // largest where there is neither.
  function round(form, x) {
    if (Number.isNaN(x)) return x;
    if (!Number.isFinite(x)) return beyond(form, x);
    const by = gap(form, x);
    const magnitude = toEven(Math.abs(x) / by) * by;
    return magnitude <= form.max ? signed(magnitude, x) : beyond(form, x);
  }

  function beyond(form, x) {
    if (!form.hasNan) return signed(form.max, x);
    return form.finiteOnly ? NaN : signed(Infinity, x);
  }

  // The fields of a number of the format: sign, exponent with its bias, mantissa without its 1.
  function bitsOf(form, x) {
    const sign = isNegative(x) ? 1 : 0;
    const special = 2 ** form.exponentBits - 1;
    if (Number.isNaN(x)) {
      const quiet = 2 ** (form.mantissaBits - 1);
      return [0, special, form.finiteOnly ? 2 * quiet - 1 : quiet];
    }
    if (!Number.isFinite(x)) return [sign, special, 0];
    const magnitude = Math.abs(x);
    if (magnitude < form.minNormal) return [sign, 0, magnitude / form.minSubnormal];
    const exponent = exponentOf(magnitude);
    return [sign, exponent + form.bias, (magnitude / 2 ** exponent - 1) / form.eps];
  }

  function nextAbove(form, x) {
    if (x >= form.max) return form.finiteOnly ? NaN : Infinity;
    if (x < -form.max) return -form.max;
    let by = gap(form, x);
    // Just below a power of two in magnitude the numbers are twice as dense.
    if (-x > form.minNormal && -x === 2 ** exponentOf(x)) by /= 2;
    const above = (Math.floor(x / by) + 1) * by;
    return x < 0 && above === 0 ? -0 : above;
  }

  // The largest number of the format below x, and the smallest above it.
  function neighbours(form, x) {
    if (Number.isNaN(x)) return [NaN, NaN];
    return [-nextAbove(form, -x), nextAbove(form, x)];
  }

  // ---- blocks that share a scale: all arithmetic in fp32, as in halfstep.formats.blocks

  const f = Math.fround;
  const LARGEST = byName.fp32.max;
  const BLOCKS = [
    { name: "mxfp8", element: byName.e4m3fn, block: 32, rule: "rceil" },
    { name: "mxfp4", element: byName.e2m1, block: 32, rule: "rceil" },
    { name: "nvfp4", element: byName.e2m1, block: 16, rule: "two-level" },
  ];

  // The scales of one block, whose largest magnitude is given; of two levels, also the tensor's.
  function scales(form, largest, ofTensor = largest) {
    const top = form.element.max;
    if (form.rule === "rceil") {
      const wanted = f(f(largest) * f(1 / top));
      // e8m0: the next power of two from there up, and 2^-127 at least
      let exponent = -127;
      if (wanted > 2 ** -127) {
        exponent = exponentOf(wanted);
        if (2 ** exponent < wanted) exponent += 1;
      }
      return { encode: 2 ** -exponent, decode: 2 ** exponent, outer: 1, stored: 2 ** exponent };
    }
    const whole = byName.e4m3fn.max;
    const outer = ofTensor === 0 ? 1 : f(Math.min(f((whole * top) / f(ofTensor)), LARGEST));
    const rest = f(1 / outer);
    const wanted = Math.min(f(f(largest) * f(outer * f(1 / top))), whole);
    const stored = round(byName.e4m3fn, wanted);
    const encode = Math.min(f(1 / f(stored * rest)), LARGEST);
    return { encode, decode: stored, outer: rest, stored };
  }

  // What becomes of one number of a block with these scales: within the block, and multiplied back.
  function inBlock(form, x, by) {
    const top = form.element.max;
    const scaled = Math.max(-top, Math.min(top, f(f(x) * by.encode)));
    const code = round(form.element, scaled);
    return { code, value: f(f(code * by.decode) * by.outer) };
  }

  // ---- a histogram by powers of two, times a loss scale

  // Of histogram[e] numbers with 2^e <= |g| < 2^(e+1): the shares that a format flushes to 0, holds as
  // subnormal numbers, holds in full, and overflows, after times 2^scale. Within a power of two the
  // numbers are taken as spread evenly.
  function shares(form, histogram, scale) {
    const half = form.minSubnormal / 2; // ties: half of the smallest goes to 0
    const largest = form.max + gap(form, form.max) / 2;
    const ends = {
      zero: [0, half],
      subnormal: [half, form.minNormal - half],
      normal: [form.minNormal - half, largest],
      overflow: [largest, Infinity],
    };
    const found = { zero: 0, subnormal: 0, normal: 0, overflow: 0 };
    let total = 0;
    for (const [exponent, count] of Object.entries(histogram)) {
      const low = 2 ** (Number(exponent) + scale);
      total += count;
      for (const [kind, [from, to]] of Object.entries(ends)) {
        found[kind] += (count * Math.max(0, Math.min(to, 2 * low) - Math.max(from, low))) / low;
      }
    }
    for (const kind of Object.keys(found)) found[kind] /= total;
    return found;
  }

  return { FORMATS, BLOCKS, byName, exponentOf, gap, round, bitsOf, neighbours, scales, inBlock, shares };
})();
