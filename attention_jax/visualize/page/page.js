// What the models have in common: the token in question, the line of words, keys and pointer.

const panels = [];
// What is shown now in bars and in words, once every model shows it.
function say() {
  const most = Math.max(...panels.map((panel) => panel.weights.reduce((a, b) => Math.max(a, b), 0)));
  panels.forEach((panel) => panel.list(most || 1));
  const lines = panels.map((panel) => (panel.name ? `${panel.name}: ` : "") + panel.words());
  const [a, b] = panels;
  if (b && a.at.side === "queries" && b.at.side === "queries" && a.at.index === b.at.index
    && a.text("queries") === b.text("queries") && a.text("keys") === b.text("keys")) {
    const moved = a.weights.reduce((sum, w, s) => sum + Math.abs(w - b.weights[s]) / 2, 0);
    lines.push(`they differ in ${moved.toFixed(2)} of the weight`);
  }
  document.getElementById("says").replaceChildren(...lines.map((line) => make("span", {}, line)));
}

// Shows a token, and in the other model the same one, where it has the same text.
function select(panel, side, index, hold) {
  for (const each of panels) {
    if (each.text(side) !== panel.text(side)) continue;
    if (hold) {
      each.held = { side, index };
      each.last[side] = index;
    }
    each.show({ side, index });
  }
  say();
}

function release() {
  for (const panel of panels) panel.show(panel.held);
  say();
}

let link = null;
let difference = null;
function pick(panel, layer, head, focus = false) {
  for (const each of link && link.checked ? panels : [panel]) each.pick(layer, head);
  if (difference) difference.draw();
  if (focus) panel.cells[panel.at_layer][panel.at_head].focus();
  say();
}

// A page that scrolls under a resting pointer is no wish to see another token.
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

// The token above or below one, as the lines happen to break.
function line(list, at, step) {
  const boxes = [...list.children].map((option) => option.getBoundingClientRect());
  const middle = (boxes[at].left + boxes[at].right) / 2;
  let i = at;
  while (boxes[i] && Math.abs(boxes[i].top - boxes[at].top) < 4) i += step;
  if (!boxes[i]) return at;
  let best = i;
  for (const top = boxes[i].top; boxes[i] && Math.abs(boxes[i].top - top) < 4; i += step) {
    const away = (box) => Math.abs((box.left + box.right) / 2 - middle);
    if (away(boxes[i]) < away(boxes[best])) best = i;
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

data.models.forEach((model, place) => panels.push(new Panel(model, place)));
if (panels.length === 2) {
  document.getElementById("models").className = "two";
  const shape = (panel) => panel.layers.map((layer) => layer.heads).join();
  if (shape(panels[0]) === shape(panels[1])) {
    link = make("input", { type: "checkbox", checked: "" });
    document.querySelector("header").append(make("label", { class: "link" }, link, "Pick the same layer and head in both"));
  }
}
if (panels.length === 2) difference = new Difference(...panels);
say();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  panels.forEach((panel) => panel.draw());
  if (difference) difference.draw();
  release();
});
performance.mark("attention-drawn");
