// One model: selection of heads, tokens and weights.

const clamp = (i, size) => Math.min(Math.max(i, 0), size - 1);

function fact(layer, n) {
  if (layer.entropy[n] === null) return "no visible keys";
  const share = layer.share[n] === null ? "" : `, ${Math.round(100 * layer.share[n])} % of the maximum`;
  return `entropy ${layer.entropy[n].toFixed(2)} nats${share}`;
}

function swatches(kind, strengths, words) {
  return strengths.map((strength, i) => {
    const swatch = make("i", { class: kind });
    swatch.style.setProperty("--w", strength);
    return make("span", {}, swatch, ` ${words[i]}`);
  });
}

class Panel {
  constructor(model, number) {
    this.name = model.name;
    this.layers = model.layers.map((raw) => new Layer(raw));
    this.at = this.held = null; // {side, index}: the shown and the selected token
    this.last = { queries: 0, keys: 0 }; // the token that Tab returns to
    this.build(number);
    this.pick(0, 0);
  }

  get layer() { return this.layers[this.at_layer].open(); }
  text(side) { return this.layers[this.at_layer][side]; }
  size(side) { return data.texts[this.text(side)].length; }

  build(number) {
    const id = (name) => `${name}-${number}`;
    const title = make("h2", { id: id("title") }, this.name || "The model");
    if (!this.name) title.className = "hidden";
    this.choose = { layer: make("select", { id: id("layer") }), head: make("select", { id: id("head") }) };
    this.layers.forEach((layer, i) => this.choose.layer.append(make("option", { value: i }, layer.name)));
    this.choose.layer.onchange = () => pick(this, +this.choose.layer.value, this.at_head);
    this.choose.head.onchange = () => pick(this, this.at_layer, +this.choose.head.value);
    this.fact = make("span", { class: "fact" });
    this.strip = this.build_strip();
    this.lists = {};
    const lists = ["queries", "keys"].map((side) => {
      const words = side === "queries"
        ? ["Queries ", "point at one to see the keys it attends to"]
        : ["Keys ", "point at one to see the queries that attend to it"];
      const heading = make("h3", { id: id(side) }, words[0], make("small", {}, words[1]));
      this.lists[side] = make("div", {
        role: "listbox", class: "tokens", "aria-labelledby": `${id("title")} ${id(side)}`,
        "aria-describedby": "help", "aria-orientation": "horizontal",
      });
      listen(this, side, this.lists[side]);
      return make("div", {}, heading, this.lists[side]);
    });
    this.canvas = make("canvas", { role: "img" });
    this.marks = { queries: make("i", { class: "row" }), keys: make("i", { class: "column" }) };
    this.plane = make("div", { class: "plane" }, this.canvas, this.marks.queries, this.marks.keys);
    this.cell = make("figcaption");
    listen_plane(this);
    this.top_title = make("h3");
    this.top = make("ol", { class: "top" });
    this.tints = make("p", { class: "scale" });
    const root = make("section", { class: "panel", "aria-labelledby": id("title") }, title,
      make("div", { class: "pick" }, make("label", { for: id("layer") }, "Layer"), this.choose.layer,
        make("label", { for: id("head") }, "Head"), this.choose.head, this.fact),
      make("div", { class: "body" },
        make("div", { class: "heads" }, make("h3", {}, "Entropy ", make("small", {}, "of every head: select one")),
          this.strip, make("p", { class: "scale" },
            ...swatches("even", [0, 0.25, 0.5, 0.75, 1], ["one key", "", "", "", "uniform"]))),
        make("div", { class: "words" }, ...lists, this.tints,
          this.top_title, this.top),
        make("figure", {}, make("h3", {}, "The whole head ", make("small", {}, "queries down, keys across")),
          this.plane, this.cell)));
    document.getElementById("models").append(root);
  }

  build_strip() {
    const strip = make("div", { role: "grid", class: "strip", "aria-label": "Entropy by layer and head" });
    const most = Math.max(...this.layers.map((layer) => layer.heads));
    strip.style.setProperty("--names", Math.max(...this.layers.map((layer) => layer.name.length)));
    const heads = Array.from({ length: most }, (_, n) => make("div", { role: "columnheader" }, `${n}`));
    strip.append(make("div", { role: "row" }, make("div", { role: "columnheader", class: "corner" }, "head"), ...heads));
    this.cells = this.layers.map((layer, i) => {
      const cells = Array.from({ length: layer.heads }, (_, n) => {
        const cell = make("div", { role: "gridcell", tabindex: -1, "aria-selected": false,
          "aria-label": `${layer.name}, head ${n}: ${fact(layer, n)}`, title: `${layer.name}, head ${n}: ${fact(layer, n)}` });
        cell.style.setProperty("--w", layer.share[n] ?? 0);
        cell.onclick = () => pick(this, i, n, true);
        return cell;
      });
      strip.append(make("div", { role: "row" }, make("div", { role: "rowheader", title: layer.name }, layer.name), ...cells));
      return cells;
    });
    strip.onkeydown = (event) => {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
        Home: [0, -Infinity], End: [0, Infinity] };
      const step = steps[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const layer = clamp(this.at_layer + step[0], this.layers.length);
      pick(this, layer, clamp(this.at_head + step[1], this.layers[layer].heads), true);
    };
    return strip;
  }

  pick(layer, head) {
    const before = this.at_layer === undefined ? null : [this.text("queries"), this.text("keys")].join();
    if (before !== null) this.mark_cell(false);
    const changed = this.at_layer !== layer;
    this.at_layer = layer;
    this.at_head = Math.min(head, this.layers[layer].heads - 1);
    this.mark_cell(true);
    this.choose.layer.value = layer;
    if (changed) {
      this.choose.head.replaceChildren(...Array.from({ length: this.layer.heads },
        (_, n) => make("option", { value: n }, `${n}`)));
    }
    this.choose.head.value = this.at_head;
    this.fact.textContent = fact(this.layer, this.at_head);
    if (before !== [this.text("queries"), this.text("keys")].join()) {
      this.write("queries");
      this.write("keys");
      this.held = { side: "queries", index: this.size("queries") - 1 };
      this.last = { queries: this.held.index, keys: 0 };
      this.lists.queries.scrollTop = this.lists.queries.scrollHeight;
    }
    this.draw();
    this.show(this.held);
  }

  mark_cell(on) {
    const cell = this.cells[this.at_layer][this.at_head];
    cell.setAttribute("aria-selected", on);
    cell.tabIndex = on ? 0 : -1;
  }

  write(side) {
    const options = data.texts[this.text(side)].map((word) => {
      const option = make("div", { role: "option", tabindex: -1, "aria-selected": false, dir: "auto" }, label(word));
      if (label(word) !== word) option.setAttribute("aria-label", describe(word));
      return option;
    });
    this.lists[side].replaceChildren(...options);
    this.lists[side].scrollTop = 0;
  }

  draw() {
    const { T, S } = this.layer;
    this.canvas.width = S;
    this.canvas.height = T;
    this.plane.style.aspectRatio = Math.min(Math.max(S / T, 0.5), 4);
    this.plane.style.maxWidth = `${Math.min(Math.max(2.2 * S, 12), 30)}rem`;
    this.canvas.setAttribute("aria-label", `${this.layer.name}, head ${this.at_head}: weights of ${T} queries, down, on ${S} keys, across`);
    const image = new ImageData(S, T);
    const colours = ramp("--deep");
    const { power } = this.layer;
    const levels = [0, 0.002, 0.01, 0.05, 0.2, 0.5, 1].filter((w) => w === 0 || w ** power >= 0.09);
    this.tints.replaceChildren("weight ", ...swatches("deep", levels.map((w) => w ** power), levels));
    const shares = Float32Array.from({ length: 256 }, (_, q) => 255 * (q / 255) ** (2 * power));
    for (let t = 0; t < T; t++) {
      const row = this.at_head * T + t;
      const strength = this.layer.greatest[row] ** power;
      for (let s = 0; s < S; s++) {
        image.data.set(colours[Math.round(strength * shares[this.layer.levels[row * S + s]])], 4 * (t * S + s));
        image.data[4 * (t * S + s) + 3] = 255;
      }
    }
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }

  // Shows the row of a query or the column of a key.
  show(at) {
    this.at = at;
    const { side, index } = at;
    this.weights = this.layer.slice(this.at_head, side, index);
    const threshold = contrastThreshold();
    for (const where of ["queries", "keys"]) {
      const options = this.lists[where].children;
      for (let i = 0; i < options.length; i++) {
        const here = where === side && i === index;
        const strength = where === side ? 0 : this.weights[i] ** this.layer.power;
        options[i].style.setProperty("--w", strength);
        options[i].className = here ? "at" : strength > threshold ? "strong" : strength > 0.3 ? "mid" : "";
        options[i].setAttribute("aria-selected", where === this.held.side && i === this.held.index);
        options[i].tabIndex = i === this.last[where] ? 0 : -1;
      }
    }
    const { T, S } = this.layer;
    this.marks.queries.hidden = side !== "queries";
    this.marks.keys.hidden = side !== "keys";
    if (side === "queries") Object.assign(this.marks.queries.style, { top: `${(100 * index) / T}%`, height: `${100 / T}%` });
    else Object.assign(this.marks.keys.style, { left: `${(100 * index) / S}%`, width: `${100 / S}%` });
    this.cell.textContent = "";
  }

  // The largest weights as bars, on one scale in both models.
  list(most) {
    const { side, index } = this.at;
    const text = this.text(other(side));
    this.top_title.textContent = `${named(this.text(side), index)} ${side === "queries" ? "attends to" : "is attended to by"}`;
    this.top.replaceChildren(...largest(this.weights, LISTED).map((i) => {
      const bar = make("i");
      bar.style.setProperty("--w", this.weights[i] / most);
      return make("li", {}, make("bdi", {}, named(text, i)), bar, this.weights[i].toFixed(3));
    }));
  }

  describe() {
    const { side, index } = this.at;
    const text = this.text(other(side));
    const parts = largest(this.weights, DESCRIBED).map((i) => `${named(text, i)} ${digits(this.weights[i])}`);
    const verb = side === "queries" ? "attends to" : "is attended to by";
    return `token ${named(this.text(side), index)} ${verb}: ${parts.join(", ") || "no key"}`;
  }
}
