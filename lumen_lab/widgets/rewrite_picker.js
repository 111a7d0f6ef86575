// A list of rewrites to tick; what the plan does to the network is measured in Python and shown beside it. The HTML of
// both sides comes from Python, so that the static page shows the same; here is only what moves.

const COPIED_MS = 1500;
let views = 0;

function element(tag, className, attributes = {}, children = []) {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function same(one, other) {
  return one.length === other.length && one.every((name, place) => name === other[place]);
}

// Why `name` cannot stand beside what is picked, whichever of the two rewrites declares it; empty if it can.
function reasonAgainst(name, picked, choices) {
  for (const { name: other, excludes } of choices) {
    if (!picked.includes(other)) continue;
    const mine = choices.find((choice) => choice.name === name).excludes;
    const found = mine.find(([rival]) => rival === other) ?? excludes.find(([rival]) => rival === name);
    if (found) return `not beside ${other}: ${found[1]}`;
  }
  return "";
}

function pick(model, names) {
  const order = model.get("choices").map(({ name }) => name);
  model.set("picked", order.filter((name) => names.includes(name)));
  model.save_changes();
}

function presetButtons(model) {
  return Object.entries(model.get("presets")).map(([name, names]) => {
    const button = element("button", "lumen-picker-button", { type: "button" }, [name]);
    button.addEventListener("click", () => pick(model, names));
    return { button, names };
  });
}

function build(model) {
  const presets = presetButtons(model);
  const toolbar = element(
    "div",
    "lumen-picker-presets",
    { role: "group", "aria-label": "Plans" },
    presets.map(({ button }) => button),
  );
  const choices = element("div", "lumen-picker-choices", { role: "group", "aria-label": "Rewrites" });
  choices.innerHTML = model.get("choices_html");
  const status = element("p", "lumen-picker-status", { role: "status" });
  const error = element("p", "lumen-picker-error", { role: "alert" });
  const panel = element("div", "lumen-picker-panel", { role: "region", "aria-label": "What the plan does" });
  const result = element("div", "lumen-picker-result", {}, [status, error, panel]);
  const columns = element("div", "lumen-picker-columns", {}, [choices, result]);
  const root = element("div", "lumen-picker", { role: "group", "aria-label": "Rewrite picker" }, [toolbar, columns]);
  return { root, presets, rows: choiceRows(choices), status, error, panel };
}

function choiceRows(choices) {
  const view = ++views;
  return [...choices.querySelectorAll(".lumen-picker-choice")].map((row, place) => {
    const part = (name) => row.querySelector(`.lumen-picker-${name}`);
    const told = ["claim", "because", "reason"].map((name) => {
      part(name).id = `lumen-picker-${view}-${place}-${name}`;
      return part(name).id;
    });
    const box = row.querySelector("input");
    box.setAttribute("aria-describedby", told.join(" "));
    return { row, box, place: part("place"), reason: part("reason") };
  });
}

function showChoices({ rows, presets }, model) {
  const picked = model.get("picked");
  for (const { row, box, place, reason } of rows) {
    const at = picked.indexOf(box.value);
    box.checked = at >= 0;
    place.textContent = at >= 0 ? `#${at + 1}` : "";
    reason.textContent = at >= 0 ? "" : reasonAgainst(box.value, picked, model.get("choices"));
    box.disabled = reason.textContent !== "";
    row.classList.toggle("lumen-picker-blocked", box.disabled);
  }
  for (const { button, names } of presets) button.setAttribute("aria-pressed", same(names, picked));
}

function showResult({ status, error, panel }, model) {
  const count = model.get("picked").length;
  const busy = !same(model.get("picked"), model.get("measured"));
  const plan = count ? `a plan of ${count} rewrite${count === 1 ? "" : "s"}` : "the network as it is";
  status.textContent = busy ? `Measuring ${plan} …` : model.get("summary");
  error.textContent = busy ? "" : model.get("error");
  panel.setAttribute("aria-busy", busy);
}

// The panel as Python wrote it, with a copy button, and its list of unchanged kinds open if it was.
function showPanel({ panel }, model) {
  const open = panel.querySelector("details")?.open ?? false;
  panel.innerHTML = model.get("panel");
  panel.querySelector("details")?.toggleAttribute("open", open);
  const head = panel.querySelector(".lumen-picker-code-head");
  if (head) head.append(copyButton(panel.querySelector(".lumen-picker-code")));
}

function copyButton(code) {
  const button = element("button", "lumen-picker-button", { type: "button" }, ["Copy"]);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(code)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
  return button;
}

// A page that is not served from this machine or over TLS has no clipboard: there the code is left selected.
async function copied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return false;
  }
}

function render({ model, el }) {
  const parts = build(model);
  el.append(parts.root);
  for (const { box } of parts.rows) {
    box.addEventListener("change", () => {
      const others = model.get("picked").filter((name) => name !== box.value);
      pick(model, box.checked ? [...others, box.value] : others);
    });
  }
  const onChoice = () => {
    showChoices(parts, model);
    showResult(parts, model);
  };
  const onResult = () => showResult(parts, model);
  const onPanel = () => showPanel(parts, model);
  const listeners = {
    "change:picked": onChoice,
    "change:measured": onResult,
    "change:summary": onResult,
    "change:error": onResult,
    "change:panel": onPanel,
  };
  for (const [event, listener] of Object.entries(listeners)) model.on(event, listener);
  onChoice();
  onPanel();
  return () => {
    for (const [event, listener] of Object.entries(listeners)) model.off(event, listener);
  };
}

export default { render };
