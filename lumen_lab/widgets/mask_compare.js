// A line over a photograph: one mask before it, another after it. Everything is painted here from the photograph and
// the masks, so the line and the modes work without a kernel.

const STEP = 0.01;
const LEAP = 0.1;

// A painter writes the pixel at byte `at` of `out`, seen through a mask of 0 to 255. `out` rounds by itself: it is a
// Uint8ClampedArray. No array is made a pixel, which would take seconds for a photograph.
const PAINTERS = {
  overlay: (paint) => (out, at, photograph, mask) => {
    mix(out, at, photograph, at, paint.overlay, 0, (paint.opacity * mask[at]) / 255);
  },
  masks: () => (out, at, photograph, mask) => {
    mix(out, at, mask, at, mask, at, 0);
  },
  "cut-out": (paint) => {
    const greys = paint.checker.map((grey) => [grey, grey, grey]);
    return (out, at, photograph, mask, x, y) => {
      const odd = (Math.floor(x / paint.square_px) + Math.floor(y / paint.square_px)) % 2;
      mix(out, at, greys[odd], 0, photograph, at, mask[at] / 255);
    };
  },
};
// The difference is of two masks, so it is no painter of one.
const MODES = [...Object.keys(PAINTERS), "difference"];

const WHITE = [255, 255, 255];

function mix(out, at, from, fromAt, to, toAt, share) {
  for (let channel = 0; channel < 3; channel++) {
    const start = from[fromAt + channel];
    out[at + channel] = start + (to[toAt + channel] - start) * share;
  }
  out[at + 3] = 255;
}

async function decode(bytes) {
  const blob = new Blob([bytes], { type: "image/png" });
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const context = newCanvas(bitmap.width, bitmap.height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, context.canvas.width, context.canvas.height);
}

function newCanvas(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

// A canvas of that size, each of whose pixels is written by paintAt(out, at, x, y).
function painted({ width, height }, paintAt) {
  const context = newCanvas(width, height).getContext("2d");
  const picture = context.createImageData(width, height);
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++, at += 4) paintAt(picture.data, at, x, y);
  }
  context.putImageData(picture, 0, 0);
  return context.canvas;
}

function maskPicture(photograph, mask, painter) {
  return painted(photograph, (out, at, x, y) => painter(out, at, photograph.data, mask.data, x, y));
}

function photographPicture(photograph) {
  const context = newCanvas(photograph.width, photograph.height).getContext("2d");
  context.putImageData(photograph, 0, 0);
  return context.canvas;
}

function largestDifference(left, right) {
  let largest = 1;
  for (let at = 0; at < left.data.length; at += 4) {
    largest = Math.max(largest, Math.abs(right.data[at] - left.data[at]));
  }
  return largest;
}

function differencePicture(left, right, limit, paint) {
  return painted(left, (out, at) => {
    const share = (right.data[at] - left.data[at]) / limit;
    mix(out, at, WHITE, 0, share > 0 ? paint.higher : paint.lower, 0, Math.abs(share));
  });
}

function element(tag, className, attributes = {}, children = []) {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function chooser(label, trait, options, model) {
  const select = element("select", "lumen-compare-select");
  select.append(...options.map((name) => new Option(name, name)));
  const follow = () => (select.value = model.get(trait));
  select.addEventListener("change", () => {
    model.set(trait, select.value);
    model.save_changes();
  });
  follow();
  return { node: element("label", "lumen-compare-label", {}, [label, select]), follow };
}

function build(model) {
  const names = Object.keys(model.get("masks"));
  const choosers = {
    left: chooser("Left", "left", names, model),
    mode: chooser("Show", "mode", MODES, model),
    right: chooser("Right", "right", names, model),
  };
  const controls = element("div", "lumen-compare-controls", {}, Object.values(choosers).map(({ node }) => node));
  const canvas = element("canvas", "lumen-compare-canvas", { role: "img" });
  const line = element("div", "lumen-compare-line", {
    role: "slider",
    tabindex: "0",
    "aria-label": "Line between the left and the right mask",
    "aria-orientation": "horizontal",
    "aria-valuemin": "0",
    "aria-valuemax": "100",
  });
  const before = element("span", "lumen-compare-name lumen-compare-before");
  const after = element("span", "lumen-compare-name lumen-compare-after");
  const stage = element("div", "lumen-compare-stage", {}, [canvas, before, after, line]);
  const scale = element("div", "lumen-compare-scale", { hidden: "" });
  const root = element("div", "lumen-compare", { role: "group", "aria-label": "Mask comparison" }, [
    controls,
    stage,
    scale,
  ]);
  return { root, canvas, stage, line, before, after, scale, choosers };
}

function describe(parts, model, limit) {
  const [left, right, mode] = ["left", "right", "mode"].map((name) => model.get(name));
  const differs = mode === "difference";
  parts.before.textContent = differs ? "photograph" : left;
  parts.after.textContent = differs ? `${right} − ${left}` : right;
  parts.canvas.setAttribute("aria-label", `${mode}: ${parts.before.textContent} against ${parts.after.textContent}`);
  parts.scale.hidden = !differs;
  const full = (limit / 255).toFixed(3);
  const { lower, higher } = model.get("paint");
  const [low, high] = [lower, higher].map((color) => `rgb(${color.join(" ")})`);
  const bar = element("span", "lumen-compare-bar", { style: `background: linear-gradient(90deg, ${low}, white, ${high})` });
  parts.scale.replaceChildren(`right lower −${full}`, bar, `+${full} right higher`);
}

function showPosition(parts, pictures, position) {
  const { width, height } = parts.canvas;
  const edge = Math.round(position * width);
  const context = parts.canvas.getContext("2d");
  if (edge > 0) context.drawImage(pictures.before, 0, 0, edge, height, 0, 0, edge, height);
  if (edge < width) {
    context.drawImage(pictures.after, edge, 0, width - edge, height, edge, 0, width - edge, height);
  }
  const percent = Math.round(100 * position);
  parts.line.style.left = `${100 * position}%`;
  parts.line.setAttribute("aria-valuenow", percent);
  const [before, after] = [parts.before.textContent, parts.after.textContent];
  parts.line.setAttribute("aria-valuetext", `${percent} % ${before}, ${100 - percent} % ${after}`);
}

function positionAfterKey(event, position) {
  const step = event.shiftKey ? LEAP : STEP;
  const moves = { ArrowLeft: -step, ArrowDown: -step, ArrowRight: step, ArrowUp: step, PageDown: -LEAP, PageUp: LEAP };
  if (event.key === "Home") return 0;
  if (event.key === "End") return 1;
  return event.key in moves ? position + moves[event.key] : null;
}

function followHand(parts, moveTo, model) {
  const toPointer = (event) => {
    const box = parts.stage.getBoundingClientRect();
    moveTo((event.clientX - box.left) / box.width);
  };
  parts.stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    parts.stage.setPointerCapture(event.pointerId);
    parts.line.focus({ preventScroll: true });
    toPointer(event);
    event.preventDefault();
  });
  parts.stage.addEventListener("pointermove", (event) => {
    if (parts.stage.hasPointerCapture(event.pointerId)) toPointer(event);
  });
  parts.line.addEventListener("keydown", (event) => {
    const position = positionAfterKey(event, model.get("position"));
    if (position === null) return;
    // Otherwise the notebook takes the arrow and selects another cell.
    event.preventDefault();
    event.stopPropagation();
    moveTo(position);
  });
}

async function load(model) {
  const masks = Object.entries(model.get("masks"));
  const [photograph, ...pixels] = await Promise.all(
    [model.get("photograph"), ...masks.map(([, bytes]) => bytes)].map(decode),
  );
  return { photograph, masks: Object.fromEntries(masks.map(([name], place) => [name, pixels[place]])) };
}

function repaint({ photograph, masks }, model) {
  const paint = model.get("paint");
  const [left, right] = [masks[model.get("left")], masks[model.get("right")]];
  const limit = largestDifference(left, right);
  if (model.get("mode") === "difference") {
    return { before: photographPicture(photograph), after: differencePicture(left, right, limit, paint), limit };
  }
  const painter = PAINTERS[model.get("mode")](paint);
  const [before, after] = [left, right].map((mask) => maskPicture(photograph, mask, painter));
  return { before, after, limit };
}

async function render({ model, el }) {
  const parts = build(model);
  el.append(parts.root);
  const pixels = await load(model);
  parts.canvas.width = pixels.photograph.width;
  parts.canvas.height = pixels.photograph.height;
  parts.root.style.setProperty("--lumen-natural-width", `${pixels.photograph.width}px`);
  parts.root.style.setProperty("--lumen-aspect", pixels.photograph.width / pixels.photograph.height);

  let pictures;
  const onPosition = () => showPosition(parts, pictures, model.get("position"));
  const onChoice = () => {
    for (const { follow } of Object.values(parts.choosers)) follow();
    pictures = repaint(pixels, model);
    describe(parts, model, pictures.limit);
    onPosition();
  };

  let waiting = false;
  const moveTo = (position) => {
    model.set("position", Math.min(1, Math.max(0, Math.round(position * 1000) / 1000)));
    if (waiting) return;
    // One message a frame is enough for the kernel, however fast the pointer moves.
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      model.save_changes();
    });
  };

  followHand(parts, moveTo, model);
  const choices = "change:left change:right change:mode".split(" ");
  for (const event of choices) model.on(event, onChoice);
  model.on("change:position", onPosition);
  onChoice();
  return () => {
    for (const event of choices) model.off(event, onChoice);
    model.off("change:position", onPosition);
  };
}

export default { render };
