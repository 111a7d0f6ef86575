// Every head of the decoder on one picture. Maps are painted and read here from the arrays that Python ships, so pixel,
// stage and view move without a kernel.

const LEAP = 4;
const BARS = 40; // height of a histogram, in units of its drawing
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function element(tag, className, attributes = {}, children = []) {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Shipped bytes are views into larger buffers, at places where floats may not begin: they are copied.
function bytesOf(view) {
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}

function keyOf(stage, view, network) {
  return `${view === "mask" ? 0 : stage}/${view}/${network}`;
}

function load(model) {
  const palettes = Object.entries(model.get("palettes")).map(([name, view]) => [name, new Uint8Array(bytesOf(view))]);
  const shapes = model.get("shapes");
  const maps = Object.entries(model.get("maps")).map(([key, view]) => {
    const bytes = bytesOf(view);
    const values = shapes[key].palette === "colour" ? new Uint8Array(bytes) : new Float32Array(bytes);
    return [key, { ...shapes[key], values }];
  });
  return { palettes: Object.fromEntries(palettes), maps: Object.fromEntries(maps), ...model.get("facts") };
}

function cellOf(pixel, size, shape) {
  return [0, 1].map((axis) => Math.floor((pixel[axis] * shape[axis]) / size[axis]));
}

function valueOf(data, key, pixel) {
  const map = data.maps[key];
  if (!map || map.palette === "colour") return null;
  const [row, column] = cellOf(pixel, data.size, map.size);
  return map.values[row * map.size[1] + column];
}

function written(value) {
  return value === null ? "–" : String(Number(value.toPrecision(4))).replace("-", "−");
}

function paint(canvas, map, palettes) {
  [canvas.height, canvas.width] = map.size;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(canvas.width, canvas.height);
  const colours = palettes[map.palette];
  const last = colours ? colours.length / 3 - 1 : 0;
  for (let place = 0, at = 0; at < picture.data.length; place++, at += 4) {
    let [from, start] = [map.values, 3 * place];
    if (colours) {
      const share = Math.min(1, Math.max(0, (map.values[place] - map.low) / (map.high - map.low)));
      [from, start] = [colours, 3 * Math.floor(share * last + 0.5)];
    }
    for (let channel = 0; channel < 3; channel++) picture.data[at + channel] = from[start + channel];
    picture.data[at + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
}

async function paintPhotograph(canvas, bytes) {
  const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }), { colorSpaceConversion: "none" });
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}

// A large picture to click into, with a frame around the cell that is read.
function panel(name) {
  const canvas = element("canvas", "lumen-heads-canvas", { role: "img", "aria-label": name });
  const mark = element("div", "lumen-heads-mark");
  const stage = element("div", "lumen-heads-stage", { tabindex: "0", role: "group" }, [canvas, mark]);
  const caption = element("figcaption", "lumen-heads-caption");
  const figure = element("figure", "lumen-heads-panel", {}, [caption, stage]);
  return { figure, caption, stage, canvas, mark, name, shape: null };
}

function placeMark({ mark, shape }, pixel, size) {
  mark.hidden = !shape;
  if (!shape) return;
  const [row, column] = cellOf(pixel, size, shape);
  Object.assign(mark.style, {
    top: `${(100 * row) / shape[0]}%`,
    left: `${(100 * column) / shape[1]}%`,
    height: `${100 / shape[0]}%`,
    width: `${100 / shape[1]}%`,
  });
}

function stageButtons(data, choose) {
  return data.stages.map((stage) => {
    const note = { 4: ", deepest", 1: ", last" }[stage] ?? "";
    const button = element("button", "lumen-heads-button", { type: "button" }, [`Stage ${stage}${note}`]);
    button.addEventListener("click", () => choose({ stage }));
    return { button, stage };
  });
}

function thumbnails(data, choose) {
  return Object.entries(data.views).map(([view, meaning]) => {
    const canvases = data.networks.map(() => element("canvas", "lumen-heads-small", { "aria-hidden": "true" }));
    const label = element("span", "lumen-heads-name", {}, [view]);
    const attributes = { type: "button", title: meaning, "aria-label": `${view}: ${meaning}` };
    const button = element("button", "lumen-heads-thumbnail", attributes, [label, ...canvases]);
    button.addEventListener("click", () => choose({ view }));
    return { button, view, canvases };
  });
}

function valueTable(data) {
  const views = Object.keys(data.views).filter((view) => view !== "components");
  const top = element("tr", "", {}, [
    element("th", "", { scope: "col", rowspan: "2" }, ["head"]),
    ...data.stages.map((stage) =>
      element("th", "", { scope: "colgroup", colspan: data.networks.length, "data-stage": stage }, [`stage ${stage}`]),
    ),
  ]);
  const columns = data.stages.flatMap((stage) => data.networks.map((network) => ({ stage, network })));
  const below = element("tr", "", {}, columns.map(({ stage, network }) =>
    element("th", "", { scope: "col", "data-stage": stage }, [network])));
  const cells = [];
  const rows = views.map((view) => {
    const head = element("th", "", { scope: "row" }, [view]);
    const across = columns.map(({ stage, network }) => {
      const cell = element("td", "", { "data-stage": stage });
      // The mask belongs to no stage; it stands once, below the last.
      if (view !== "mask" || stage === data.stages.at(-1)) cells.push({ cell, stage, view, network });
      return cell;
    });
    return element("tr", "", { "data-view": view }, [head, ...across]);
  });
  const caption = element("caption", "");
  const body = element("tbody", "", {}, rows);
  const table = element("table", "lumen-heads-table", {}, [caption, element("thead", "", {}, [top, below]), body]);
  return { table, caption, cells };
}

// Log heights, so that a code that occurs once is seen beside one that occurs a thousand times.
function histogram(name, counts) {
  const most = Math.log1p(Math.max(...counts)) || 1;
  const bars = counts.map((count, at) => {
    const height = count ? Math.max(0.8, (BARS * Math.log1p(count)) / most) : 0;
    return height ? `M${at} ${BARS}v${-height.toFixed(2)}h1V${BARS}z` : "";
  });
  const used = counts.filter((count) => count > 0).length;
  const said = `${name}: ${used} of ${counts.length} codes used`;
  const drawing = element("div", "");
  drawing.innerHTML = `<svg viewBox="0 0 ${counts.length} ${BARS}" preserveAspectRatio="none" role="img"><path/></svg>`;
  drawing.querySelector("svg").setAttribute("aria-label", said);
  drawing.querySelector("path").setAttribute("d", bars.join(""));
  return element("figure", "lumen-heads-codes", {}, [drawing, element("figcaption", "", {}, [said])]);
}

function build(data, choose) {
  const stages = stageButtons(data, choose);
  const views = thumbnails(data, choose);
  const panels = ["photograph", ...data.networks].map(panel);
  const table = valueTable(data);
  const meaning = element("p", "lumen-heads-meaning");
  const status = element("p", "lumen-heads-status", { role: "status" });
  const codesHead = element("p", "lumen-heads-codes-head");
  const codes = element("div", "lumen-heads-histograms");
  const group = (className, label, children) =>
    element("div", className, { role: "group", "aria-label": label }, children);
  const root = group("lumen-heads", "Decoder heads", [
    group("lumen-heads-buttons", "Stages", stages.map(({ button }) => button)),
    group("lumen-heads-strip", `Heads, ${data.networks.join(" above ")}`, views.map(({ button }) => button)),
    meaning,
    element("div", "lumen-heads-panels", {}, panels.map(({ figure }) => figure)),
    status,
    element("div", "lumen-heads-scroll", { tabindex: "0", role: "region", "aria-label": "Values" }, [table.table]),
    codesHead,
    codes,
  ]);
  root.style.setProperty("--lumen-aspect", data.size[1] / data.size[0]);
  return { root, stages, views, panels, table, meaning, status, codesHead, codes };
}

function showChoice(parts, data, model) {
  const [stage, view] = [model.get("stage"), model.get("view")];
  for (const one of parts.stages) one.button.setAttribute("aria-pressed", one.stage === stage);
  for (const one of parts.views) {
    const maps = data.networks.map((network) => data.maps[keyOf(stage, one.view, network)]);
    one.button.setAttribute("aria-pressed", one.view === view);
    one.button.disabled = !maps.some(Boolean);
    one.canvases.forEach((canvas, place) => {
      canvas.classList.toggle("lumen-heads-none", !maps[place]);
      if (maps[place]) paint(canvas, maps[place], data.palettes);
    });
  }
  for (const part of parts.panels.slice(1)) showMap(part, data, stage, view);
  const order = data.networks.length > 1 ? ` Small pictures: ${data.networks.join(" above ")}.` : "";
  parts.meaning.textContent = `${view}: ${data.views[view]}.${order}`;
  for (const marked of parts.table.table.querySelectorAll("[data-stage], [data-view]")) {
    marked.classList.toggle("lumen-heads-chosen", marked.dataset.stage === String(stage) || marked.dataset.view === view);
  }
  const counts = Object.entries(model.get("codes")[stage] ?? {});
  parts.codesHead.textContent = counts.length ? `Codes of the ${data.coded} in stage ${stage}, log counts` : "";
  parts.codes.replaceChildren(...counts.map(([name, each]) => histogram(name, each)));
}

function showMap(part, data, stage, view) {
  const map = data.maps[keyOf(stage, view, part.name)];
  part.shape = map?.size ?? null;
  part.canvas.hidden = !map;
  part.canvas.setAttribute("aria-label", `${part.name}: ${view} of stage ${stage}`);
  const scale = map && map.palette !== "colour" ? `, ${written(map.low)} to ${written(map.high)}` : "";
  const told = map ? `${map.size.join(" × ")}${scale}` : `there is no ${view} here`;
  part.caption.textContent = `${part.name}: ${told}`;
  if (map) paint(part.canvas, map, data.palettes);
}

function showPixel(parts, data, model) {
  const [pixel, stage, view] = ["pixel", "stage", "view"].map((name) => model.get(name));
  const where = `row ${pixel[0]}, column ${pixel[1]}`;
  for (const part of parts.panels) {
    placeMark(part, pixel, data.size);
    part.stage.setAttribute("aria-label", `${part.name} at ${where}; arrow keys move the pixel`);
  }
  for (const { cell, stage: at, view: head, network } of parts.table.cells) {
    cell.textContent = written(valueOf(data, keyOf(at, head, network), pixel));
  }
  parts.table.caption.textContent = `Values at ${where}`;
  const said = data.networks.map((network) => `${network} ${written(valueOf(data, keyOf(stage, view, network), pixel))}`);
  parts.status.textContent = `${where}: ${view}${view === "mask" ? "" : ` of stage ${stage}`}, ${said.join(", ")}`;
}

function followHand(part, data, model, moveTo) {
  const toPointer = (event) => {
    const box = part.stage.getBoundingClientRect();
    const share = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    moveTo(share.map((value, axis) => Math.floor(value * data.size[axis])));
  };
  part.stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    part.stage.setPointerCapture(event.pointerId);
    part.stage.focus({ preventScroll: true });
    toPointer(event);
    event.preventDefault();
  });
  part.stage.addEventListener("pointermove", (event) => {
    if (part.stage.hasPointerCapture(event.pointerId)) toPointer(event);
  });
  part.stage.addEventListener("keydown", (event) => {
    if (!(event.key in MOVES)) return;
    // Otherwise the notebook takes the arrow and selects another cell.
    event.preventDefault();
    event.stopPropagation();
    moveTo(afterKey(model.get("pixel"), event, part.shape ?? data.size, data.size));
  });
}

// The middle of the next cell: one step is a cell of the map that has the keyboard.
function afterKey(pixel, event, shape, size) {
  const leap = event.shiftKey ? LEAP : 1;
  const move = MOVES[event.key];
  return cellOf(pixel, size, shape).map((cell, axis) => {
    if (!move[axis]) return pixel[axis];
    const next = Math.min(shape[axis] - 1, Math.max(0, cell + leap * move[axis]));
    return Math.floor(((next + 0.5) * size[axis]) / shape[axis]);
  });
}

async function render({ model, el }) {
  const data = load(model);
  const choose = (values) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  };
  const parts = build(data, choose);
  el.append(parts.root);
  const [photograph] = parts.panels;
  photograph.caption.textContent = `photograph: ${data.size.join(" × ")}`;
  photograph.shape = data.size;
  await paintPhotograph(photograph.canvas, bytesOf(model.get("photograph")));

  let waiting = false;
  const moveTo = (place) => {
    model.set("pixel", place.map((value, axis) => Math.min(data.size[axis] - 1, Math.max(0, value))));
    if (waiting) return;
    // One message a frame is enough for the kernel, however fast the pointer moves.
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      model.save_changes();
    });
  };
  for (const part of parts.panels) followHand(part, data, model, moveTo);

  const onPixel = () => showPixel(parts, data, model);
  const onChoice = () => {
    showChoice(parts, data, model);
    onPixel();
  };
  const listeners = { "change:stage": onChoice, "change:view": onChoice, "change:pixel": onPixel };
  for (const [event, listener] of Object.entries(listeners)) model.on(event, listener);
  onChoice();
  return () => {
    for (const [event, listener] of Object.entries(listeners)) model.off(event, listener);
  };
}

export default { render };
