// Shows openapi.json as a page, from which requests can be sent. Every address is relative to the page, so any path
// prefix works; all text goes into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
let components = {};

/** An element with properties and children, of which those that are null are left out. */
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const table = (rows) =>
  element("table", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)))));

const nameOf = (reference) => reference.split("/").at(-1);

/** What a value may be, with links to the schemas that it names. */
function typeOf(schema = {}) {
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return join(either.map(typeOf), " or ");
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    return element("a", { href: `#schema-${name}`, textContent: name });
  }
  if (schema.type === "array") return element("span", {}, "list of ", typeOf(schema.items));
  if (schema.enum ?? schema.const) return (schema.enum ?? [schema.const]).map((one) => JSON.stringify(one)).join(" or ");
  if (typeof schema.additionalProperties === "object") return element("span", {}, "object of ", typeOf(schema.additionalProperties));
  return schema.type ?? "any";
}

const join = (parts, between) =>
  element("span", {}, ...parts.flatMap((part, place) => (place ? [between, part] : [part])));

function fieldsOf(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => [
    element("code", { textContent: name }),
    element("span", {}, typeOf(field), required.has(name) ? ", required" : ""),
    field.description ?? "",
  ]);
  return table(rows);
}

function exampleOf(content) {
  if (content.example !== undefined) return content.example;
  const schema = content.schema?.$ref ? components[nameOf(content.schema.$ref)] : content.schema;
  return JSON.stringify(schema?.examples?.[0] ?? {}, null, 2);
}

function operationOf(path, method, operation) {
  const inside = element("div", { className: "inside" });
  if (operation.description) inside.append(element("p", { className: "description", textContent: operation.description }));
  const inputs = (operation.parameters ?? []).map((parameter) => {
    const input = element("input", { ariaLabel: parameter.name, placeholder: parameter.name });
    return [parameter.name, input];
  });
  if (inputs.length) {
    inside.append(element("h3", { textContent: "Parameters" }));
    inside.append(table(inputs.map(([name, input]) => [element("code", { textContent: name }), input])));
  }
  const contents = Object.entries(operation.requestBody?.content ?? {});
  const kind = element("select", { ariaLabel: "Content type" }, ...contents.map(([name]) => element("option", { textContent: name })));
  const body = element("textarea", { ariaLabel: "Body", spellcheck: false });
  if (contents.length) {
    const fill = () => (body.value = exampleOf(operation.requestBody.content[kind.value]));
    kind.addEventListener("change", fill);
    fill();
    inside.append(element("h3", {}, "Body: ", join(contents.map(([, one]) => typeOf(one.schema)), " or ")), kind, body);
  }
  const send = element("button", { type: "button", textContent: "Send" });
  const answer = element("pre", { hidden: true, ariaLive: "polite" });
  send.addEventListener("click", async () => {
    const address = inputs.reduce((so, [name, input]) => so.replace(`{${name}}`, encodeURIComponent(input.value)), path);
    const headers = { ...(contents.length && { "Content-Type": kind.value }), ...($("key").value && { "X-API-Key": $("key").value }) };
    answer.hidden = false;
    answer.textContent = "…";
    answer.textContent = await sent(address.slice(1), { method, headers, ...(contents.length && { body: body.value }) });
  });
  inside.append(send, answer, element("h3", { textContent: "Responses" }));
  const responses = Object.entries(operation.responses).map(([status, { description, content }]) => {
    const types = Object.entries(content ?? {}).map(([name, one]) => element("span", {}, `${name}: `, typeOf(one.schema)));
    return [element("code", { textContent: status }), description, join(types, ", ")];
  });
  inside.append(table(responses));
  const head = element(
    "summary", {},
    element("code", { className: "method", textContent: method.toUpperCase() }),
    element("code", { textContent: path }),
    element("span", { className: "hint", textContent: operation.summary ?? "" }),
  );
  return element("details", { id: operation.operationId ?? `${method}${path}` }, head, inside);
}

async function sent(address, options) {
  try {
    const response = await fetch(address, options);
    const text = await response.text();
    const isJson = response.headers.get("content-type") === "application/json";
    return `${response.status} ${response.statusText}\n\n${isJson ? JSON.stringify(JSON.parse(text), null, 2) : text}`;
  } catch (error) {
    return `no answer (${error.message})`;
  }
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  const description = await response.json();
  components = description.components?.schemas ?? {};
  $("key-line").hidden = !description.components?.securitySchemes;
  const groups = new Map();
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "other";
      groups.set(tag, [...(groups.get(tag) ?? []), operationOf(path, method, operation)]);
    }
  }
  for (const [tag, operations] of groups) $("operations").append(element("h2", { textContent: tag }), ...operations);
  for (const [name, schema] of Object.entries(components)) {
    const text = schema.description ? element("p", { className: "description", textContent: schema.description }) : null;
    const inside = element("div", { className: "inside" }, text, fieldsOf(schema));
    $("schemas").append(element("details", { id: `schema-${name}` }, element("summary", {}, element("code", { textContent: name })), inside));
  }
  $("schemas").hidden = false;
  addEventListener("hashchange", openNamed);
  openNamed();
}

/** Open what the address names, so that links lead to something visible. */
function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named?.tagName !== "DETAILS") return;
  named.open = true;
  named.scrollIntoView();
}

show().catch((error) => {
  $("problem").textContent = `openapi.json cannot be read (${error.message}); load the page again`;
  $("problem").hidden = false;
});
