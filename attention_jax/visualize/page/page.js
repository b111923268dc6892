// State shared by the models: the selected token, its description, keyboard and pointer.

const panels = [];
// Updates bars and descriptions, after every model has updated its weights.
function update() {
  const most = Math.max(...panels.map((panel) => panel.weights.reduce((a, b) => Math.max(a, b), 0)));
  panels.forEach((panel) => panel.list(most || 1));
  const lines = panels.map((panel) => (panel.name ? `${panel.name}: ` : "") + panel.describe());
  const [a, b] = panels;
  if (b && a.at.side === "queries" && b.at.side === "queries" && a.at.index === b.at.index
    && a.text("queries") === b.text("queries") && a.text("keys") === b.text("keys")) {
    const distance = a.weights.reduce((sum, w, s) => sum + Math.abs(w - b.weights[s]) / 2, 0);
    lines.push(`total variation distance ${distance.toFixed(2)}`);
  }
  document.getElementById("says").replaceChildren(...lines.map((line) => make("span", {}, line)));
}

// Shows a token, in both models if they have the same tokens.
function select(panel, side, index, hold) {
  for (const each of panels) {
    if (each.text(side) !== panel.text(side)) continue;
    if (hold) {
      each.held = { side, index };
      each.last[side] = index;
    }
    each.show({ side, index });
  }
  update();
}

function release() {
  for (const panel of panels) panel.show(panel.held);
  update();
}

let link = null;
let difference = null;
function pick(panel, layer, head, focus = false) {
  for (const each of link && link.checked ? panels : [panel]) each.pick(layer, head);
  if (difference) difference.draw();
  if (focus) panel.cells[panel.at_layer][panel.at_head].focus();
  update();
}

// Scrolling under a resting pointer also sends events; these are ignored.
const pointer = {};
function moved(event) {
  const rests = pointer.x === event.clientX && pointer.y === event.clientY;
  Object.assign(pointer, { x: event.clientX, y: event.clientY });
  return !rests;
}

function listen(panel, side, list) {
  const index = (event) => [...list.children].indexOf(event.target.closest("[role=option]"));
  list.onpointerover = (event) => {
    if (moved(event) && index(event) >= 0) select(panel, side, index(event), false);
  };
  list.onpointerleave = release;
  list.addEventListener("focusin", (event) => {
    if (index(event) >= 0) select(panel, side, index(event), true);
  });
  list.onkeydown = (event) => {
    const at = index(event);
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: line(list, at, -1), ArrowDown: line(list, at, 1),
      Home: 0, End: list.children.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    list.children[clamp(to, list.children.length)].focus();
  };
}

// The token above or below, in the current layout of lines.
function line(list, at, step) {
  const boxes = [...list.children].map((option) => option.getBoundingClientRect());
  const middle = (boxes[at].left + boxes[at].right) / 2;
  let i = at;
  while (boxes[i] && Math.abs(boxes[i].top - boxes[at].top) < 4) i += step;
  if (!boxes[i]) return at;
  let best = i;
  for (const top = boxes[i].top; boxes[i] && Math.abs(boxes[i].top - top) < 4; i += step) {
    const distance = (box) => Math.abs((box.left + box.right) / 2 - middle);
    if (distance(boxes[i]) < distance(boxes[best])) best = i;
  }
  return best;
}

function listen_plane(panel) {
  const find = (event) => {
    const box = panel.plane.getBoundingClientRect();
    return [clamp(Math.floor(((event.clientY - box.top) / box.height) * panel.layer.T), panel.layer.T),
      clamp(Math.floor(((event.clientX - box.left) / box.width) * panel.layer.S), panel.layer.S)];
  };
  const show = (event, hold) => {
    const [t, s] = find(event);
    select(panel, "queries", t, hold);
    panel.cell.textContent = `${named(panel.text("queries"), t)} \u2192 ${named(panel.text("keys"), s)}: ${panel.weights[s].toFixed(3)}`;
  };
  panel.plane.onpointermove = (event) => show(event, false);
  panel.plane.onclick = (event) => show(event, true);
  panel.plane.onpointerleave = release;
}

data.models.forEach((model, number) => panels.push(new Panel(model, number)));
if (panels.length === 2) {
  document.getElementById("models").className = "two";
  const shape = (panel) => panel.layers.map((layer) => layer.heads).join();
  if (shape(panels[0]) === shape(panels[1])) {
    link = make("input", { type: "checkbox", checked: "" });
    document.querySelector("header").append(make("label", { class: "link" }, link, "Select the same layer and head in both"));
  }
}
if (panels.length === 2) difference = new Difference(...panels);
update();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  panels.forEach((panel) => panel.draw());
  if (difference) difference.draw();
  release();
});
performance.mark("attention-drawn");
