// The difference of the weights of two models on the same tokens.

class Difference {
  constructor(before, after) {
    this.models = [before, after];
    this.at = { queries: 0, keys: 0 };
    this.canvas = make("canvas", { role: "img" });
    this.mark = make("i");
    this.plane = make("div", { class: "plane", tabindex: 0, role: "application", "aria-labelledby": "difference",
      "aria-describedby": "difference-help" }, this.canvas, this.mark);
    this.cell = make("figcaption", { "aria-live": "polite" });
    this.fact = make("span", { class: "fact" });
    this.tints = make("p", { class: "scale" });
    this.root = make("section", { class: "panel difference", "aria-labelledby": "difference" },
      make("h2", { id: "difference" }, `${after.name} minus ${before.name}`),
      make("p", { class: "help", id: "difference-help" },
        "Queries down, keys across. Point at a cell, or press Tab and move from cell to cell with the arrow keys. "),
      this.fact, this.tints, make("figure", {}, this.plane, this.cell));
    this.plane.onpointermove = this.plane.onclick = (event) => {
      const box = this.plane.getBoundingClientRect();
      const index = (part, size) => clamp(Math.floor(part * size), size);
      this.go(index((event.clientY - box.top) / box.height, before.layer.T),
        index((event.clientX - box.left) / box.width, before.layer.S), event.type === "click");
    };
    this.plane.onpointerleave = release;
    this.plane.onfocus = () => this.go(this.at.queries, this.at.keys, true);
    this.plane.onkeydown = (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
        Home: [0, -Infinity], End: [0, Infinity] }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.go(clamp(this.at.queries + step[0], before.layer.T), clamp(this.at.keys + step[1], before.layer.S), true);
    };
    document.getElementById("models").append(this.root);
    this.draw();
  }

  pair(t, s) { return this.models.map((panel) => panel.layer.weight(panel.at_head, t, s)); }

  // Describes a cell, and selects its row in both models unless it is selected already.
  go(t, s, hold) {
    const [panel, after] = this.models;
    if (hold || panel.at.side !== "queries" || panel.at.index !== t) select(panel, "queries", t, hold);
    this.at = { queries: t, keys: s };
    const [a, b] = this.pair(t, s);
    const sign = b < a ? "\u2212" : "+";
    this.cell.textContent = `${named(panel.text("queries"), t)} \u2192 ${named(panel.text("keys"), s)}: `
      + `${panel.name} ${a.toFixed(3)}, ${after.name} ${b.toFixed(3)}, ${sign}${Math.abs(b - a).toFixed(3)}`;
    const { T, S } = panel.layer;
    this.mark.hidden = false;
    Object.assign(this.mark.style, { top: `${(100 * t) / T}%`, height: `${100 / T}%`, left: `${(100 * s) / S}%`, width: `${100 / S}%` });
  }

  draw() {
    const [before, after] = this.models;
    this.root.hidden = ["queries", "keys"].some((side) => before.text(side) !== after.text(side));
    if (this.root.hidden) return;
    const { T, S, power } = before.layer;
    const [less, more] = [ramp("--deep"), ramp("--even")];
    const image = new ImageData(S, T);
    let distance = 0;
    for (let t = 0; t < T; t++) {
      for (let s = 0; s < S; s++) {
        const [a, b] = this.pair(t, s);
        distance += Math.abs(b - a) / 2;
        image.data.set((b < a ? less : more)[Math.round(255 * Math.abs(b - a) ** power)], 4 * (t * S + s));
        image.data[4 * (t * S + s) + 3] = 255;
      }
    }
    Object.assign(this.canvas, { width: S, height: T });
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    const heads = this.models.map((panel) => `${panel.name}: ${panel.layer.name}, head ${panel.at_head}`);
    this.fact.textContent = `${heads.join("; ")}. Mean total variation distance of the rows: ${(distance / T).toFixed(2)}.`;
    this.canvas.setAttribute("aria-label", `Differences of ${T} queries, down, on ${S} keys, across. ${this.fact.textContent}`);
    const levels = [0.5, 0.2, 0.05, 0.01];
    const tints = levels.map((w) => w ** power);
    this.tints.replaceChildren(`${before.name} larger `, ...swatches("deep", tints, levels.map((w) => `\u2212${w}`)),
      ...swatches("even", [0, ...tints.reverse()], [0, ...levels.reverse().map((w) => `+${w}`)]), ` ${after.name} larger`);
    this.plane.style.aspectRatio = before.plane.style.aspectRatio;
    this.plane.style.maxWidth = before.plane.style.maxWidth;
    this.at = { queries: clamp(this.at.queries, T), keys: clamp(this.at.keys, S) };
    this.mark.hidden = true;
    this.cell.textContent = "";
  }
}
