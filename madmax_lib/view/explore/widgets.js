// Draws spans by rank and stream. One buffer holds the columns: start, duration and name of every span as int32 (times
// in ticks), with about.links where it was launched (-1: nowhere), then its kind as uint8. Spans lie row after row, in
// each row in order of start. Rows with a level are calls of a host thread; one rank's are shown at a time.
const AXIS = 22, TITLE = 20, FAINT = 0.35; // CSS pixels; least opacity of a pixel in which anything happens
const BODY = `<div class="bar"><span class="legend"></span><input type="search" placeholder="search names, Enter: next" aria-label="search names">
  <button title="show everything (0)">all</button><label hidden>calls of <select></select></label>
  <span class="status" role="status"></span></div>
  <div class="rows"><canvas tabindex="0" role="img"></canvas><div></div></div><div class="tip" hidden></div>
  <div class="detail" hidden></div><div class="report"></div>
  <div class="help">wheel or W S: zoom · drag, shift+wheel or A D: pan · click: a span and what launched it ·
  shift+drag: select a window, Esc: clear</div>`;

function unpack(data, about) {
  const bytes = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength), n = about.count;
  const numbers = Array.from({ length: about.links ? 4 : 3 }, (_, k) => new Int32Array(bytes, 4 * k * n, n));
  const [start, dur, name, launch] = numbers;
  const reach = new Int32Array(n); // latest end so far in the row: sorted, so a time is found by halving
  for (const row of about.rows)
    for (let i = row.first, last = 0; i < row.end; i++) reach[i] = last = Math.max(last, start[i] + dur[i]);
  return { start, dur, name, launch, reach, kind: new Uint8Array(bytes, 4 * numbers.length * n, n) };
}

function firstAbove(values, low, high, limit) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// One line of pixels: in each the mean colour of what happens there, as opaque as the share of its time that is busy.
function paint(line, [low, high], { start, dur }, shade, colors, [t0, t1], part, full) {
  const width = line.length, scale = width / (t1 - t0), kinds = colors.length;
  part.fill(0); full.fill(0); // partly covered pixels; where runs of fully covered ones begin (+1) and end (-1)
  for (let i = low; i < high; i++) {
    const a = Math.max((start[i] - t0) * scale, 0), b = Math.min((start[i] + dur[i] - t0) * scale, width);
    const p = Math.min(a | 0, width - 1), q = Math.min(b | 0, width - 1), at = shade[i] * width;
    if (p >= q) part[at + p] += Math.max(b - a, 1e-3);
    else {
      part[at + p] += p + 1 - a; part[at + q] += b - q;
      full[at + p + 1] += 1; full[at + q] -= 1;
    }
  }
  const running = new Int32Array(kinds);
  for (let x = 0; x < width; x++) {
    let sum = 0, red = 0, green = 0, blue = 0;
    for (let k = 0; k < kinds; k++) {
      const share = (running[k] += full[k * width + x]) + part[k * width + x];
      if (!share) continue;
      const [r, g, b] = colors[k];
      sum += share; red += share * r; green += share * g; blue += share * b;
    }
    const alpha = 255 * Math.max(FAINT, Math.min(sum, 1));
    if (sum) line[x] = (alpha << 24) | ((blue / sum) << 16) | ((green / sum) << 8) | (red / sum);
  }
}

// Sliders, menus and boxes of ipywidgets have no name for a screen reader: the text beside them becomes it.
function name_controls(explorer) {
  for (const label of explorer?.querySelectorAll(".widget-label") || []) {
    const control = label.parentElement.querySelector("[role=slider], select, input, textarea");
    const value = label.parentElement.querySelector(".widget-readout");
    control?.setAttribute("aria-label", label.textContent);
    if (value) control?.setAttribute("aria-valuetext", value.textContent);
  }
}

function striped(ctx) { // white diagonals over what was simulated, not measured
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6; pen.strokeStyle = "rgba(255,255,255,.6)"; pen.beginPath();
  for (const x of [-6, 0, 6]) pen.moveTo(x, 6), pen.lineTo(x + 6, 0);
  return pen.stroke(), ctx.createPattern(tile, "repeat");
}

const UNITS = [["s", 1], ["ms", 1e3], ["µs", 1e6], ["ns", 1e9]];
function time(seconds, step) { // four digits, or as exact as the steps of an axis
  const [unit, factor] = UNITS.find(([, f]) => (step ? 10 * step : Math.abs(seconds)) * f >= 1) || UNITS[3];
  const value = seconds * factor, places = step && Math.max(0, -Math.floor(Math.log10(step * factor)));
  return `${+(step ? value.toFixed(places) : value.toPrecision(4))} ${unit}`;
}

function render({ model, el }) {
  el.classList.add("madmax-timeline");
  el.innerHTML = BODY;
  for (const name of ["lm", "jp", "p"]) el.setAttribute(`data-${name}-suppress-shortcuts`, "true"); // keys stay ours
  const parts = ["canvas", "input", "button", ".status", ".tip", ".report", ".legend", "select", ".detail", ".rows"];
  const [canvas, search, all, status, tip, report, legend, ranks, detail, box] = parts.map((p) => el.querySelector(p));
  const ctx = canvas.getContext("2d"), lines = document.createElement("canvas"), stripes = striped(ctx);
  let about, spans, shade, colors, view; // view: first and last tick that is shown
  let matches = null, brush = null, drag = null, left = 0, asked = 0, found = -1, matching = 0, chosen = -1;
  let wide = 0; // width of the canvas in CSS pixels, read once a draw because the browser lays the page out for it
  const x_of = (t) => left + ((t - view[0]) / (view[1] - view[0])) * (wide - left);
  const t_of = (x) => view[0] + ((x - left) / (wide - left)) * (view[1] - view[0]);
  const schedule = () => (asked ||= requestAnimationFrame(() => ((asked = 0), draw())));

  function load() {
    about = model.get("_about");
    const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
    colors = about.kinds.map((kind) => hex(kind.color));
    spans = unpack(model.get("_data"), about);
    view = [0, about.reach];
    legend.innerHTML = about.kinds.map((kind) => `<i style="background:${kind.color}"></i>${kind.label} `).join("");
    const hosts = [...new Set(about.rows.filter(isCall).map((row) => row.rank))];
    ranks.innerHTML = [...hosts.map((rank) => `<option value="${rank}">rank ${rank}</option>`), "<option>none"].join("");
    ranks.parentElement.hidden = !hosts.length;
    chosen = -1;
    place(); filter();
  }

  const isCall = (row) => row.level >= 0;
  function place() { // rows that are not shown have no height
    const shown = about.rows.filter((row) => !isCall(row)).length;
    const most = about.links ? Math.max(12, Math.min(18, 640 / shown)) : Math.max(3, Math.min(18, 640 / shown));
    let y = 0, panel = -1;
    for (const row of about.rows) {
      if (row.panel !== panel) y += TITLE;
      row.tall = !isCall(row) ? most : `${row.rank}` === ranks.value ? 13 : 0;
      panel = row.panel; row.y = y; y += row.tall;
    }
    const seen = Math.min(y, Math.round(0.85 * innerHeight) - AXIS); // the canvas stays in place while rows scroll
    canvas.style.height = `${seen + AXIS}px`;
    box.lastElementChild.style.height = `${y - seen}px`;
    schedule();
  }

  function filter() {
    const text = search.value.toLowerCase(), grey = about.kinds.length;
    matches = text ? about.names.map((name) => name.toLowerCase().includes(text)) : null;
    shade = matches ? spans.kind.map((kind, i) => (matches[spans.name[i]] ? kind : grey)) : spans.kind;
    matching = matches ? spans.name.reduce((sum, name) => sum + matches[name], 0) : 0;
    found = -1;
    schedule();
  }

  function draw() {
    const began = performance.now(), u = devicePixelRatio || 1, css = getComputedStyle(el), top = box.scrollTop;
    wide = canvas.clientWidth;
    if (!wide) return;
    const tall = canvas.clientHeight - AXIS;
    canvas.width = wide * u; canvas.height = (tall + AXIS) * u; ctx.scale(u, u);
    ctx.font = "11px sans-serif"; ctx.textBaseline = "middle"; ctx.fillStyle = css.color;
    const low = about.rows[0].tall < 9;
    left = low ? 60 : 10 + Math.max(...about.rows.map((row) => (row.tall ? ctx.measureText(row.label).width : 0)));
    const shown = about.rows.filter((row) => row.tall && row.y + row.tall > top && row.y < top + tall + TITLE);
    const width = Math.max(Math.round((wide - left) * u), 1), image = new ImageData(width, Math.max(shown.length, 1));
    const shades = matches ? [...colors, [205, 205, 205]] : colors; // grey: what the search does not find
    const part = new Float32Array(shades.length * width), full = new Int32Array(part.length);
    const pixels = new Uint32Array(image.data.buffer);
    const ranges = shown.map(({ first, end }) =>
      [firstAbove(spans.reach, first, end, view[0]), firstAbove(spans.start, first, end, view[1])]);
    ranges.forEach((range, r) => {
      paint(pixels.subarray(r * width, (r + 1) * width), range, spans, shade, shades, view, part, full);
    });
    lines.width = width; lines.height = image.height; lines.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.translate(0, -top);
    shown.forEach((row, r) => ctx.drawImage(lines, 0, r, width, 1, left, row.y + 1, wide - left, Math.max(row.tall - 2, 2)));
    hatch(shown);
    shown.forEach((row, r) => {
      ctx.fillStyle = css.color;
      if (row.tall >= 9) ctx.fillText(row.label, 4, row.y + row.tall / 2);
      if (row.title) ctx.fillText(row.title, left, row.y - TITLE / 2);
      if (ranges[r][1] - ranges[r][0] < 4 * width && row.tall >= 12) names(row, ranges[r]);
    });
    drawBrush(brush); drawChosen(css.color);
    ctx.setTransform(u, 0, 0, u, 0, 0); ctx.clearRect(0, tall, wide, AXIS);
    axis(css.color);
    canvas.dataset.ms = (performance.now() - began).toFixed(1);
    canvas.dataset.draws = 1 + +(canvas.dataset.draws || 0);
    status.textContent = `${about.count.toLocaleString("en")} spans, ${time((view[1] - view[0]) * about.tick_s)} shown`;
    if (matches) status.textContent += `, ${matching.toLocaleString("en")} match`;
    canvas.setAttribute("aria-label", `timeline of ${about.rows.length} rows, ${status.textContent}`);
    name_controls(el.closest(".madmax-explorer"));
  }

  function hatch(rows) { // only what was drawn, so an idle stream stays empty
    const simulated = rows.filter((row) => row.simulated);
    if (!simulated.length) return;
    const first = simulated[0], last = simulated[simulated.length - 1];
    ctx.globalCompositeOperation = "source-atop"; ctx.fillStyle = stripes;
    for (const { y, tall } of first.panel === last.panel ? [{ y: first.y, tall: last.y + last.tall - first.y }] : simulated)
      ctx.fillRect(left, y + 1, wide - left, tall - 2);
    ctx.globalCompositeOperation = "source-over";
  }

  // Names are cut by their letters: clipping regions cost a hundred times as much.
  function names(row, [low, high]) {
    for (let i = low; i < high; i++) {
      const a = Math.max(x_of(spans.start[i]), left), b = Math.min(x_of(spans.start[i] + spans.dur[i]), wide);
      if (b - a < 5) continue;
      ctx.fillStyle = "rgba(255,255,255,.8)"; ctx.fillRect(b - 1, row.y + 1, 1, row.tall - 2);
      if (b - a < 50) continue;
      ctx.fillStyle = "#fff";
      ctx.fillText(about.names[spans.name[i]].slice(0, (b - a) / 6), a + 3, row.y + row.tall / 2, b - a - 6);
    }
  }

  function axis(color) {
    const least = ((view[1] - view[0]) * about.tick_s) / Math.max((wide - left) / 90, 1);
    const ten = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= least);
    const y = canvas.clientHeight - AXIS;
    ctx.fillStyle = color;
    for (let k = Math.ceil((view[0] * about.tick_s) / step); k * step <= view[1] * about.tick_s; k++) {
      const x = x_of((k * step) / about.tick_s);
      const text = time(k * step, step), room = x < wide - 50; // at the right end it stands left of its tick
      ctx.fillRect(x, y + 1, 1, 4); ctx.fillText(text, room ? x + 3 : x - 3 - ctx.measureText(text).width, y + 11);
    }
  }

  function drawBrush(range) {
    if (!range) return;
    const [a, b] = range.map(x_of);
    ctx.fillStyle = "rgba(90,90,90,.18)"; ctx.fillRect(a, box.scrollTop, b - a, canvas.clientHeight - AXIS);
  }

  function show(t0, t1) {
    const length = Math.min(Math.max(t1 - t0, 20), about.reach);
    const first = Math.min(Math.max(t0, 0), about.reach - length);
    view = [first, first + length]; schedule();
  }
  const zoom = (factor, t = (view[0] + view[1]) / 2) => show(t - (t - view[0]) * factor, t + (view[1] - t) * factor);
  const pan = (share) => show(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
  function select(range) {
    model.set("selection", range ? range.map((t) => t * about.tick_s) : []); model.save_changes();
  }
  function selected() {
    const range = model.get("selection").map((t) => t / about.tick_s);
    brush = range.length ? range : null; schedule();
  }

  // The span under the mouse, or one within three pixels of it; -1 where there is none.
  function under(event) {
    const t = t_of(event.offsetX), at = event.offsetY + box.scrollTop;
    const row = about.rows.find(({ y, tall }) => at >= y && at < y + tall);
    const near = (3 * (view[1] - view[0])) / wide; // three pixels
    let best = -1, distance = near;
    for (let i = row ? firstAbove(spans.reach, row.first, row.end, t - near) : 0; row && i < row.end; i++) {
      if (spans.start[i] > t + near) break;
      const off = Math.max(spans.start[i] - t, t - spans.start[i] - spans.dur[i], 0);
      if (off <= distance) (best = i), (distance = off);
    }
    return event.offsetX < left ? -1 : best;
  }

  function hover(event) {
    const best = under(event), row = about.rows[rowOf(best)];
    if ((tip.hidden = best < 0)) return;
    const [start, dur] = [spans.start, spans.dur].map((column) => time(column[best] * about.tick_s));
    const kind = about.kinds[spans.kind[best]].label;
    tip.textContent = `${about.names[spans.name[best]]}\n${kind}, ${dur} at ${start}\n${row.label}`;
    tip.style.left = `${Math.min(event.offsetX + 12, wide - 220)}px`;
    tip.style.top = `${box.offsetTop + event.offsetY + 14}px`;
  }

  const rowOf = (i) => about.rows.findIndex(({ first, end }) => i >= first && i < end);
  const nameOf = (i) => about.names[spans.name[i]];
  function around(i) { // the calls of its thread that are open when a span starts, outermost first
    const own = about.rows[rowOf(i)], t = spans.start[i];
    const outer = about.rows.filter((row) => isCall(row) && row.rank === own.rank && row.stream === own.stream
      && row.panel === own.panel && (!isCall(own) || row.level < own.level));
    return outer.map(({ first, end }) => firstAbove(spans.start, first, end, t) - 1)
      .filter((at, k) => at >= outer[k].first && spans.start[at] + spans.dur[at] >= t);
  }

  function launched(i) { // what a call launched
    const found = [];
    if (spans.launch) for (let k = 0; k < about.count; k++) if (spans.launch[k] === i) found.push(k);
    return found;
  }

  function choose(i) {
    chosen = i; detail.hidden = i < 0; detail.textContent = "";
    if (i < 0) return schedule();
    const line = (text, kind) => {
      const p = document.createElement("div");
      p.className = kind || ""; p.textContent = text; detail.append(p);
    };
    const t = (ticks) => time(ticks * about.tick_s), from = spans.launch ? spans.launch[i] : -1, to = launched(i);
    const row = about.rows[rowOf(i)];
    line(nameOf(i), "name");
    line(`${about.kinds[spans.kind[i]].label}, ${t(spans.dur[i])} at ${t(spans.start[i])}, ${where(row)}`);
    if (from >= 0) {
      line(`launched by ${nameOf(from)}, ${t(spans.start[i] - spans.start[from])} before it starts`);
      if (ranks.value !== `${row.rank}`) (ranks.value = row.rank), place();
    }
    if (to.length) line(`launches ${to.length > 1 ? `${to.length} spans, first ` : ""}${nameOf(to[0])}`);
    const stack = around(from >= 0 ? from : i).map(nameOf);
    if (stack.length) line(`stack\n${stack.map((name, k) => `${"  ".repeat(Math.min(k, 20))}${name}`).join("\n")}`, "stack");
    schedule();
  }
  const where = (row) => isCall(row) ? `rank ${row.rank}, host thread ${-row.stream}` : row.label;

  function drawChosen(color) { // the span in a frame, and arrows from launches to what they launch
    if (chosen < 0) return;
    const from = spans.launch ? spans.launch[chosen] : -1, ends = from >= 0 ? [[from, chosen]] : [];
    if (from < 0) for (const to of launched(chosen).slice(0, 100)) ends.push([chosen, to]);
    const middle = (i) => ((row) => row.y + row.tall / 2)(about.rows[rowOf(i)]), row = about.rows[rowOf(chosen)];
    const a = x_of(spans.start[chosen]), b = x_of(spans.start[chosen] + spans.dur[chosen]);
    ctx.save(); ctx.beginPath(); ctx.rect(left, 0, wide - left, canvas.clientHeight - AXIS); ctx.clip();
    ctx.strokeStyle = ctx.fillStyle = color; ctx.lineWidth = 1.5;
    ctx.strokeRect(a - 1, row.y, Math.max(b - a, 1) + 2, row.tall);
    for (const [launch, work] of ends) {
      if (!about.rows[rowOf(launch)].tall) continue;
      const [x, y, u, v] = [x_of(spans.start[launch]), middle(launch), x_of(spans.start[work]), middle(work)];
      ctx.beginPath(); ctx.moveTo(x, y); ctx.bezierCurveTo((x + u) / 2, y, (x + u) / 2, v, u, v); ctx.stroke();
      ctx.beginPath(); ctx.moveTo(u, v); ctx.lineTo(u - 7, v - 4); ctx.lineTo(u - 7, v + 4); ctx.fill();
    }
    ctx.restore();
  }

  function next() {
    let best = -1;
    for (let i = 0; i < about.count; i++) {
      const later = matches?.[spans.name[i]] && spans.start[i] > found;
      if (later && (best < 0 || spans.start[i] < spans.start[best])) best = i;
    }
    if (best < 0) return (found = -1);
    found = spans.start[best];
    const middle = found + spans.dur[best] / 2;
    const half = Math.min((view[1] - view[0]) / 2, 10 * Math.max(spans.dur[best], 1));
    choose(best);
    box.scrollTop = Math.max(0, about.rows[rowOf(best)].y - 100);
    show(middle - half, middle + half);
  }

  canvas.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && !event.shiftKey && view[1] - view[0] >= about.reach) return; // the page scrolls on
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 800);
    else zoom(Math.exp(event.deltaY * 0.002), t_of(Math.max(event.offsetX, left)));
  });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.focus({ preventScroll: true }); canvas.setPointerCapture(event.pointerId); tip.hidden = true;
    drag = { x: event.offsetX, t: t_of(event.offsetX), view: [...view], brush: event.shiftKey };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const t = t_of(event.offsetX), moved = ((drag.x - event.offsetX) / (wide - left)) * (drag.view[1] - drag.view[0]);
    if (!drag.brush) return show(drag.view[0] + moved, drag.view[1] + moved);
    brush = [drag.t, t].sort((a, b) => a - b).map((end) => Math.min(Math.max(end, view[0]), view[1]));
    schedule();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag?.brush && brush?.[1] > brush?.[0]) select(brush);
    else if (drag && !drag.brush && Math.abs(drag.x - event.offsetX) < 3) choose(under(event));
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("keydown", (event) => {
    const closer = () => zoom(0.7), farther = () => zoom(1 / 0.7), back = () => pan(-0.2), on = () => pan(0.2);
    const keys = {
      w: closer, "+": closer, ArrowUp: closer, s: farther, "-": farther, ArrowDown: farther,
      a: back, ArrowLeft: back, d: on, ArrowRight: on,
      0: () => show(0, about.reach), Escape: () => (choose(-1), select(null)), "/": () => search.focus(),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault(); event.stopPropagation(); keys[event.key]();
  });
  search.addEventListener("input", filter);
  search.addEventListener("keydown", (event) => event.key === "Enter" && next());
  all.addEventListener("click", () => show(0, about.reach));
  ranks.addEventListener("change", place);
  box.addEventListener("scroll", schedule);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
  const theme = new MutationObserver(schedule); // JupyterLab says its theme at the page's body
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });
  const reported = () => (report.innerHTML = model.get("_report"));
  const heard = { "change:_data": load, "change:_report": reported, "change:selection": selected };
  for (const [what, answer] of Object.entries(heard)) model.on(what, answer);
  const observer = new ResizeObserver(schedule);
  addEventListener("resize", place);
  load(); selected(); reported(); observer.observe(canvas);
  return () => {
    for (const [what, answer] of Object.entries(heard)) model.off(what, answer);
    observer.disconnect(); theme.disconnect(); removeEventListener("resize", place); cancelAnimationFrame(asked);
  };
}

export default { render };
