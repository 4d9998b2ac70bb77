// A form made of a card's schema; what the server does not take is said beside its field.

import { h } from "cards/dom";

export function configForm(node, { isLive, configure }) {
  const fields = Object.entries(node.schema.properties ?? {});
  if (!fields.length) return null;
  const rows = fields.map(([name, schema]) => row(name, schema, node.config[name]));
  const note = h("p", { class: "hint", role: "status" });
  const apply = h("button", { type: "submit", id: "apply" }, "Apply");
  const form = h("form", { novalidate: true, onsubmit: submit },
    h("fieldset", { disabled: !isLive }, h("legend", { class: "unseen" }, "Configuration"), rows),
    isLive ? h("div", { class: "actions" }, apply, h("span", { class: "hint" }, "Starts the run over."), note) : null);

  async function submit(event) {
    event.preventDefault();
    const values = Object.fromEntries(fields.map(([name, schema]) => [name, valueOf(form.elements[name], schema)]));
    say(form, fields, {});
    note.textContent = "";
    try {
      await configure(values);
    } catch (error) {
      const wrong = error.fields ?? {};
      say(form, fields, wrong);
      const first = fields.find(([name]) => name in wrong);
      if (first) form.elements[first[0]].focus();
      else note.textContent = `${error.message}.`;
    }
  }
  return form;
}

export function row(name, schema, value, prefix = "field") {
  const id = `${prefix}-${name}`;
  return h("div", { class: "field" },
    h("label", { for: id }, name),
    control(name, id, schema, value),
    h("p", { class: "hint", id: `${id}-hint` }, schema.description ?? ""),
    h("p", { class: "wrong", id: `${id}-wrong`, role: "alert" }));
}

function control(name, id, schema, value) {
  const common = { name, id, "aria-describedby": `${id}-hint ${id}-wrong` };
  if (schema.enum) {
    return h("select", common, schema.enum.map((choice) => h("option", { selected: choice === value }, choice)));
  }
  if (schema.type === "boolean") return h("input", { ...common, type: "checkbox", checked: value });
  // Text for numbers too: a browser hides from us what it does not take for one, and the server says what is wrong.
  const isNumber = schema.type === "integer" || schema.type === "number";
  return h("input", { ...common, type: "text", value, inputmode: isNumber ? "decimal" : null, autocomplete: "off", spellcheck: "false" });
}

export const valueOf = (field, schema) => (schema.type === "boolean" ? field.checked : field.value);

function say(form, fields, wrong) {
  for (const [name] of fields) {
    form.querySelector(`#field-${name}-wrong`).textContent = wrong[name] ?? "";
    form.elements[name].setAttribute("aria-invalid", String(name in wrong));
  }
}
