// The weights as the page holds them, and the words for tokens.

const data = JSON.parse(document.getElementById("data").textContent);
const MOST = 8; // tokens in the list of the largest weights
const SAID = 5; // tokens in the line that is said aloud

// What stands for a token that could not be seen, and what is said of it.
const SIGNS = { " ": ["\u2423", "space"], "\n": ["\u23ce", "new line"], "\r": ["\u23ce", "new line"],
  "\t": ["\u21e5", "tab"], "\u2028": ["\u23ce", "new line"], "\u2029": ["\u23ce", "new line"], "\x7f": ["\u2421"] };
// A control picture for a control character, U+FFFD for what has no picture.
const printable = (text) => text.replace(/[\0-\x1f\x7f-\x9f\u2028\u2029\ufdd0-\ufdef\ufffe\uffff]/g,
  (c) => (SIGNS[c] || [c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "\ufffd"])[0]);
const seen = (text) => printable(text.trim() ? text : text.replaceAll(" ", SIGNS[" "][0])) || "\u2205";
const spoken = (text) => printable(text.trim())
  || [...text].map((c) => (SIGNS[c] || [])[1] || "blank").join(" ") || "nothing";

const counts = data.texts.map((words) => {
  const count = new Map();
  for (const word of words) count.set(word, (count.get(word) || 0) + 1);
  return count;
});
// A word that comes more than once is told apart by its place.
const named = (text, i) => {
  const word = data.texts[text][i];
  return counts[text].get(word) > 1 ? `${spoken(word)} #${i}` : spoken(word);
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

// One attention: w = m (q / 255) ** 2, m being the greatest weight of the row.
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
  // How strong the tint of a weight is: an even spread over the keys has a fifth of the whole.
  get power() { return Math.min(0.5, Math.log(5) / Math.log(Math.max(this.S, 2))); }
  weight(n, t, s) {
    const row = n * this.T + t;
    const share = this.levels[row * this.S + s] / 255;
    return this.greatest[row] * share * share;
  }
  look(n, side, index) {
    return side === "queries"
      ? Float32Array.from({ length: this.S }, (_, s) => this.weight(n, index, s))
      : Float32Array.from({ length: this.T }, (_, t) => this.weight(n, t, index));
  }
}

const other = (side) => (side === "queries" ? "keys" : "queries");
// The places of the largest weights; of those that would read as 0 only where there is no other.
function largest(weights, count) {
  const least = weights.some((w) => w >= 0.0005) ? 0.0005 : Number.MIN_VALUE;
  return [...weights.keys()].filter((i) => weights[i] >= least)
    .sort((i, j) => weights[j] - weights[i] || i - j).slice(0, count);
}
const digits = (w) => (w >= 0.005 ? w.toFixed(2) : w >= 0.0005 ? w.toFixed(3) : "less than 0.001");

// From which tint on the words on it are light instead of dark, or the other way about.
const turn = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--turn"));

function ramp(to) {
  const style = getComputedStyle(document.documentElement);
  const [low, high] = ["--card", to].map((name) =>
    [1, 3, 5].map((i) => parseInt(style.getPropertyValue(name).trim().slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => low.map((x, c) => x + ((high[c] - x) * i) / 255));
}
