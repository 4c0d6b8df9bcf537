// Unpacks the spans that stand in the page, gives them to the canvas, and lets tables be sorted and filtered.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function columnsOf(planes, n) { // bytes of four numbers apart, start and launch as differences; then kinds
  const data = new Uint8Array(17 * n), numbers = new Int32Array(data.buffer, 0, 4 * n);
  for (let column = 0; column < 4; column++)
    for (let i = 0, at = 4 * n * column; i < n; i++) {
      const b = (k) => planes[at + k * n + i];
      const value = b(0) | (b(1) << 8) | (b(2) << 16) | (b(3) << 24);
      numbers[column * n + i] = value + (i && column % 3 === 0 ? numbers[column * n + i - 1] : 0);
    }
  data.set(planes.subarray(16 * n), 16 * n);
  return new DataView(data.buffer);
}

// Compute, exposed communication and idle time of each rank between two times: unions over its streams.
function account(about, data, [from, to]) {
  const n = about.count, start = new Int32Array(data.buffer, 0, n), dur = new Int32Array(data.buffer, 4 * n, n);
  const kind = new Uint8Array(data.buffer, 16 * n, n), label = (i) => about.kinds[kind[i]].label, ranks = {};
  for (const row of about.rows.filter((row) => !(row.level >= 0)))
    for (let i = row.first; i < row.end; i++) {
      const a = Math.max(start[i], from), b = Math.min(start[i] + dur[i], to);
      const of = (ranks[row.rank] ||= { compute: [], communication: [], all: [] });
      if (a < b) of.all.push([a, b]), of[label(i)]?.push([a, b]);
    }
  const union = (parts) => {
    let sum = 0, end = -1;
    for (const [a, b] of parts.sort((p, q) => p[0] - q[0])) (sum += Math.max(b - Math.max(a, end), 0)), (end = Math.max(b, end));
    return sum;
  };
  const text = (ticks) => `${time(ticks * about.tick_s)} (${Math.round((100 * ticks) / (to - from))} %)`;
  const rows = Object.entries(ranks).map(([rank, { compute, communication, all }]) => {
    const busy = union(compute), exposed = union([...compute, ...communication]) - busy;
    return `<tr><td>rank ${rank}<td>${text(busy)}<td>${text(exposed)}<td>${text(to - from - union(all))}`;
  });
  return `<table><tr><th>${time((to - from) * about.tick_s)}<th>compute<th>exposed communication<th>idle${rows.join("")}</table>`;
}

async function fill(el) {
  const about = JSON.parse(new TextDecoder().decode(await unpacked(el.dataset.about)));
  const data = columnsOf(await unpacked(el.dataset.spans), about.count), heard = {};
  const values = { _about: about, _data: data, _report: "", selection: [] };
  const model = {
    get: (name) => values[name], on: (what, answer) => (heard[what] = answer), off: () => {}, save_changes: () => {},
    set(name, value) {
      values[name] = value;
      values._report = value.length ? account(about, data, value.map((s) => s / about.tick_s)) : "";
      heard["change:selection"](); heard["change:_report"]();
    },
  };
  render({ model, el });
  el.dataset.ready = "yes";
}

for (const el of document.querySelectorAll("#canvas")) fill(el);
for (const table of document.querySelectorAll("table.data")) {
  table.tHead.addEventListener("click", ({ target }) => {
    const k = target.cellIndex, down = target.dataset.order !== "down", body = table.tBodies[0];
    if (k === undefined) return;
    for (const head of table.tHead.rows[0].cells) delete head.dataset.order;
    target.dataset.order = down ? "down" : "up";
    const key = (row) => row.cells[k].dataset.v ?? row.cells[k].textContent;
    const order = (p, q) => (isNaN(p) || isNaN(q) ? String(q).localeCompare(p) : q - p) * (down ? 1 : -1);
    body.append(...[...body.rows].sort((p, q) => order(key(p), key(q))));
  });
}
for (const input of document.querySelectorAll("section > input")) {
  input.addEventListener("input", () => {
    const text = input.value.toLowerCase(), rows = input.nextElementSibling.querySelectorAll("tbody tr");
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
  });
}
