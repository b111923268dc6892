// Weights and labels of tokens.

const data = JSON.parse(document.getElementById("data").textContent);
const LISTED = 8; // tokens in the list of the largest weights
const DESCRIBED = 5; // tokens in the description

// Symbols for characters that are not printable, and their names.
const SYMBOLS = { " ": ["\u2423", "space"], "\n": ["\u23ce", "new line"], "\r": ["\u23ce", "new line"],
  "\t": ["\u21e5", "tab"], "\u2028": ["\u23ce", "new line"], "\u2029": ["\u23ce", "new line"], "\x7f": ["\u2421"] };
// Control pictures for control characters, U+FFFD for characters without one.
const printable = (text) => text.replace(/[\0-\x1f\x7f-\x9f\u2028\u2029\ufdd0-\ufdef\ufffe\uffff]/g,
  (c) => (SYMBOLS[c] || [c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "\ufffd"])[0]);
const label = (text) => printable(text.trim() ? text : text.replaceAll(" ", SYMBOLS[" "][0])) || "\u2205";
const describe = (text) => printable(text.trim())
  || [...text].map((c) => (SYMBOLS[c] || [])[1] || "blank").join(" ") || "nothing";

const counts = data.texts.map((words) => {
  const count = new Map();
  for (const word of words) count.set(word, (count.get(word) || 0) + 1);
  return count;
});
// A repeated word gets its index.
const named = (text, i) => {
  const word = data.texts[text][i];
  return counts[text].get(word) > 1 ? `${describe(word)} #${i}` : describe(word);
};

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

// One attention: w = m (q / 255) ** 2, m the largest weight of the row.
class Layer {
  constructor(raw) {
    Object.assign(this, raw);
    [this.heads, this.T, this.S] = raw.shape;
  }
  open() {
    if (typeof this.levels !== "string") return this;
    this.levels = bytes(this.levels);
    this.greatest = new Float32Array(bytes(this.greatest).buffer);
    return this;
  }
  // Exponent of the tint: uniform weights have a fifth of the full tint.
  get power() { return Math.min(0.5, Math.log(5) / Math.log(Math.max(this.S, 2))); }
  weight(n, t, s) {
    const row = n * this.T + t;
    const share = this.levels[row * this.S + s] / 255;
    return this.greatest[row] * share * share;
  }
  slice(n, side, index) {
    return side === "queries"
      ? Float32Array.from({ length: this.S }, (_, s) => this.weight(n, index, s))
      : Float32Array.from({ length: this.T }, (_, t) => this.weight(n, t, index));
  }
}

const other = (side) => (side === "queries" ? "keys" : "queries");
// Indices of the largest weights; weights that would be printed as 0 only if there are no others.
function largest(weights, count) {
  const least = weights.some((w) => w >= 0.0005) ? 0.0005 : Number.MIN_VALUE;
  return [...weights.keys()].filter((i) => weights[i] >= least)
    .sort((i, j) => weights[j] - weights[i] || i - j).slice(0, count);
}
const digits = (w) => (w >= 0.005 ? w.toFixed(2) : w >= 0.0005 ? w.toFixed(3) : "less than 0.001");

// The tint from which text on it has the opposite colour.
const contrastThreshold = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--contrast-threshold"));

function ramp(to) {
  const style = getComputedStyle(document.documentElement);
  const [low, high] = ["--card", to].map((name) =>
    [1, 3, 5].map((i) => parseInt(style.getPropertyValue(name).trim().slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => low.map((x, c) => x + ((high[c] - x) * i) / 255));
}
