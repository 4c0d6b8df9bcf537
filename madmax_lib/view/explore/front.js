// Plans by memory and time: the front as a line, the others as dots; a click chooses one.
// Colours: of series, as in figures; blue and orange would mean compute and communication.
const NS = "http://www.w3.org/2000/svg", WIDE = 720, TALL = 300, LEFT = 62, LOW = 40, TOP = 12, RIGHT = 20;

function add(parent, tag, attributes, text = "") {
  const node = parent.appendChild(document.createElementNS(NS, tag));
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return (node.textContent = text), node;
}

function ticks(low, high) {
  const least = (high - low) / 5, ten = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= least);
  return Array.from({ length: 12 }, (_, k) => (Math.ceil(low / step) + k) * step).filter((t) => t <= high);
}

function render({ model, el }) {
  el.classList.add("madmax-front");
  function draw() {
    const points = model.get("points"), chosen = model.get("chosen"), room = model.get("room_gib");
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDE} ${TALL}`);
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `${points.length} plans by memory and time; Enter chooses one`);
    svg.style = `width:100%;max-width:${WIDE}px;font-family:sans-serif`;
    const times = points.map((p) => p.step_s), low = 0.95 * Math.min(...times), high = 1.03 * Math.max(...times);
    const x = (gb) => LEFT + (gb / (room * 1.05)) * (WIDE - LEFT - RIGHT);
    const y = (s) => TALL - LOW - ((s - low) / (high - low)) * (TALL - LOW - TOP);
    const plain = { fill: "currentColor", "font-size": 11, "text-anchor": "middle" };
    const label = (at, text) => add(svg, "text", { ...plain, ...at }, text);
    if (points.length) {
      for (const t of ticks(0, room * 1.05)) label({ x: x(t), y: TALL - LOW + 14 }, +t.toPrecision(4));
      for (const t of ticks(low, high)) label({ x: LEFT - 6, y: y(t) + 4, "text-anchor": "end" }, +t.toPrecision(4));
      add(svg, "path", { d: `M${LEFT} ${TOP}V${TALL - LOW}H${WIDE - RIGHT}`, fill: "none", stroke: "currentColor" });
      add(svg, "path", { d: `M${x(room)} ${TOP}V${TALL - LOW}`, stroke: "currentColor", "stroke-dasharray": 4 });
      const front = points.filter((p) => p.front).sort((a, b) => a.memory_gib - b.memory_gib);
      const corner = (p, i) => (i ? `H${x(p.memory_gib)}V${y(p.step_s)}` : `M${x(p.memory_gib)} ${y(p.step_s)}`);
      add(svg, "path", { d: front.map(corner).join(""), fill: "none", stroke: "#2f9c95" });
    }
    label({ x: (WIDE + LEFT) / 2, y: TALL - 6 }, "memory of the fullest device [GiB], dashed: what it has");
    label({ x: -TALL / 2 + 10, y: 12, transform: "rotate(-90)" }, "step [s]");
    const order = points.map((_, i) => i).sort((a, b) => points[a].front - points[b].front); // the front on top
    for (const i of order) {
      const p = points[i];
      const [r, fill] = i === chosen ? [7, "#c44e52"] : p.front ? [5, "#fff"] : [3, "#2f9c9555"];
      const at = { cx: x(p.memory_gib), cy: y(p.step_s), r, fill, stroke: "#2f9c95" };
      const dot = add(svg, "circle", { ...at, tabindex: 0, role: "button", "data-plan": p.plan });
      const said = `${p.plan}\n${p.step_s.toPrecision(4)} s, ${p.memory_gib.toPrecision(3)} GiB`;
      add(dot, "title", {}, said); dot.setAttribute("aria-label", said);
      const choose = () => (model.set("chosen", i), model.save_changes());
      dot.style.cursor = "pointer";
      dot.addEventListener("click", choose);
      dot.addEventListener("keydown", (event) => event.key === "Enter" && choose());
    }
    el.replaceChildren(svg);
  }
  model.on("change:points change:chosen", draw); draw();
  return () => model.off("change:points change:chosen", draw);
}

export default { render };
