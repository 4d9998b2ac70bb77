// The wiring as a form: cards to add and remove, their connections as menus, their settings, and what is wrong beside each.

import { h, plural } from "cards/dom";
import { row, valueOf } from "cards/form";

const MAX_FILE = 60_000; // bytes; the server takes little more

export class Editor {
  /** onCheck is called with every wiring that has no mistakes, onClose at the end. */
  constructor(place, source, onCheck, onClose) {
    Object.assign(this, { place, source, onCheck, onClose, isOpen: false });
  }

  async open(pipeline) {
    this.cards = new Map((await this.source.cards()).map((card) => [card.card_type, card]));
    this.name = pipeline.name;
    this.nodes = pipeline.nodes.map(({ id, card_type: card, config, inputs }) =>
      ({ id, card, config: { ...config }, inputs: mapValues(inputs, ({ node, output }) => `${node}.${output}`) }));
    this.isOpen = true;
    this.place.hidden = false;
    this.drawFrame();
    this.drawNodes();
    (this.items[0]?.box.querySelector("summary") ?? this.newCard).focus();
    await this.check();
  }

  close() {
    this.isOpen = false;
    this.place.hidden = true;
    this.place.replaceChildren();
    this.onClose();
  }

  drawFrame() {
    const button = (id, text, onclick) => h("button", { type: "button", id, onclick: () => this.attempt(onclick) }, text);
    this.newCard = h("select", { id: "new-card" });
    this.status = h("p", { class: "hint", role: "status", id: "wiring-status" });
    this.general = h("ul", { class: "wrong" });
    this.list = h("ol", { class: "edited" });
    this.file = h("input", { type: "file", id: "wiring-file", accept: ".yaml,.yml", hidden: true, onchange: () => this.attempt(() => this.load()) });
    const use = button("use-wiring", "Use this wiring", () => this.use());
    use.className = "main";
    this.place.replaceChildren(
      h("h2", { id: "editor-name" }, "Edit the wiring"),
      h("p", { class: "hint" }, "An input takes an output of the same type. The wiring is checked after every change; using it starts the run over."),
      h("div", { class: "actions" }, use,
        button("save-wiring", "Save YAML", () => this.save()),
        button("load-wiring", "Load YAML", () => this.file.click()), this.file,
        button("cancel-wiring", "Cancel", () => this.close())),
      h("div", { class: "actions" }, h("label", { for: "new-card" }, "Another card"), this.newCard, button("add-card", "Add", () => this.add())),
      this.status, this.general, this.list);
  }

  /** Draw all nodes again; a change within one of them only refreshes what depends on it. */
  drawNodes() {
    const open = new Set(this.items?.filter((item) => item.box.open).map((item) => item.node));
    this.items = this.nodes.map((node, index) => this.drawNode(node, index));
    for (const item of this.items) item.box.open = open.has(item.node);
    this.list.replaceChildren(...this.items.map((item) => h("li", {}, item.box)));
    const unused = [...this.cards.values()].filter((card) => !this.nodes.some((node) => node.card === card.card_type));
    this.newCard.replaceChildren(...unused.map((card) => h("option", { value: card.card_type }, card.name)));
    this.newCard.closest(".actions").hidden = !unused.length;
    this.refreshSources();
  }

  drawNode(node, index) {
    const card = this.cards.get(node.card);
    const prefix = `node-${index}`;
    const item = { node, card, fields: new Map(), mark: h("span", { class: "wrong mark" }), title: h("span", { class: "hint" }, node.id) };
    const fieldset = (legend, rows) => (rows.length ? h("fieldset", {}, h("legend", {}, legend), rows) : null);
    const field = (place, line) => {
      item.fields.set(place, { control: line.querySelector("input, select"), wrong: line.querySelector(".wrong") });
      return line;
    };

    const id = field("id", row("id", { type: "string", description: "by which other cards take its outputs" }, node.id, prefix));
    id.querySelector("input").addEventListener("change", (event) => this.rename(item, event.target.value));
    item.sources = Object.entries(card?.takes ?? {}).map(([name, kind]) => {
      const select = h("select", { id: `${prefix}-inputs-${name}`, "aria-describedby": `${prefix}-inputs-${name}-wrong` });
      select.addEventListener("change", () => this.connect(node, name, select.value));
      field(`inputs.${name}`, h("div", { class: "field" }, h("label", { for: select.id }, name), select,
        h("p", { class: "wrong", id: `${select.id}-wrong`, role: "alert" })));
      return { name, kind, select };
    });
    const settings = Object.entries(card?.schema.properties ?? {}).map(([name, schema]) => {
      const line = field(`config.${name}`, row(name, schema, node.config[name] ?? schema.default, `${prefix}-config`));
      line.querySelector("input, select").addEventListener("change", (event) => {
        node.config[name] = valueOf(event.target, schema);
        this.attempt(() => this.check());
      });
      return line;
    });
    item.wrong = h("p", { class: "wrong", role: "alert" });
    item.box = h("details", { id: prefix },
      h("summary", {}, h("span", { class: "name" }, card?.name ?? node.card), " ", item.title, " ", item.mark),
      h("p", { class: "hint" }, card?.description ?? ""),
      item.wrong,
      fieldset("Name", [id]),
      fieldset("Inputs", item.sources.map(({ select }) => select.parentElement)),
      fieldset("Settings", settings),
      h("div", { class: "actions" }, h("button", { type: "button", id: `${prefix}-remove`, onclick: () => this.attempt(() => this.remove(index)) }, "Remove this card")));
    return item;
  }

  /** The menu of every input: the outputs of other nodes that have its type, and what it takes now. */
  refreshSources() {
    for (const { node, sources } of this.items) {
      for (const { name, kind, select } of sources) {
        const now = node.inputs[name] ?? "";
        const fitting = this.outputs(kind).filter((output) => !output.startsWith(`${node.id}.`));
        const option = (value) => h("option", { value, selected: value === now }, value || "not connected");
        select.replaceChildren(...[...new Set(["", ...fitting, now])].map(option));
      }
    }
  }

  outputs(kind) {
    return this.nodes.flatMap(({ id, card }) =>
      Object.entries(this.cards.get(card)?.gives ?? {}).filter(([, type]) => type === kind).map(([name]) => `${id}.${name}`));
  }

  async add() {
    const card = this.cards.get(this.newCard.value);
    if (!card) return;
    const word = card.card_type.split(":").at(-1).replace(/^dist_/, "").toLowerCase().replace(/[^a-z0-9_-]/g, "");
    let id = word;
    for (let number = 2; this.nodes.some((node) => node.id === id); number++) id = `${word}_${number}`;
    // What can be meant is connected; what is in doubt is left to the user.
    const only = (kind) => (this.outputs(kind).length === 1 ? this.outputs(kind) : []);
    const inputs = Object.fromEntries(Object.entries(card.takes).flatMap(([name, kind]) => only(kind).map((output) => [name, output])));
    this.nodes.push({ id, card: card.card_type, config: {}, inputs });
    this.drawNodes();
    this.reveal(id);
    await this.check();
  }

  async remove(index) {
    const [{ id }] = this.nodes.splice(index, 1);
    for (const node of this.nodes) node.inputs = Object.fromEntries(Object.entries(node.inputs).filter(([, text]) => sourceOf(text) !== id));
    this.drawNodes();
    (this.items[index] ?? this.items.at(-1))?.box.querySelector("summary").focus();
    if (!this.items.length) this.newCard.focus();
    await this.check();
  }

  /** Another id; connections to the node follow it. */
  rename(item, id) {
    const before = item.node.id;
    item.node.id = id;
    item.title.textContent = id;
    for (const node of this.nodes) {
      node.inputs = mapValues(node.inputs, (text) => (sourceOf(text) === before ? `${id}${text.slice(before.length)}` : text));
    }
    this.refreshSources();
    this.attempt(() => this.check());
  }

  connect(node, name, source) {
    if (source) node.inputs[name] = source;
    else delete node.inputs[name];
    this.attempt(() => this.check());
  }

  async check() {
    this.checks = (this.checks ?? 0) + 1;
    const number = this.checks;
    const { mistakes, pipeline } = await this.source.check(this.nodes);
    if (number !== this.checks || !this.isOpen) return; // a later change is on its way
    this.showMistakes(mistakes);
    if (pipeline) this.onCheck(pipeline);
  }

  showMistakes(mistakes) {
    for (const { fields, wrong, mark } of this.items) {
      wrong.textContent = mark.textContent = "";
      for (const { control, wrong: line } of fields.values()) {
        line.textContent = "";
        control.removeAttribute("aria-invalid");
      }
    }
    const general = [];
    for (const { node, place, message } of mistakes) {
      // One whose id is wrong is named by its number.
      const item = this.items.find((one) => one.node.id === node) ?? this.items[Number(node) - 1];
      if (!item) {
        general.push(h("li", {}, message));
        continue;
      }
      item.mark.textContent = "✗ needs a change";
      const field = item.fields.get(place);
      (field?.wrong ?? item.wrong).textContent = message;
      field?.control.setAttribute("aria-invalid", "true");
    }
    this.general.replaceChildren(...general);
    this.say(mistakes.length ? `${plural(mistakes.length, "mistake")} left.` : `${plural(this.nodes.length, "card")}, no mistakes.`, mistakes.length > 0);
  }

  async use() {
    try {
      await this.source.rewire(this.nodes);
    } catch (error) {
      if (!error.mistakes) throw error;
      this.showMistakes(error.mistakes);
      this.place.querySelector("[aria-invalid=true]")?.closest("details").setAttribute("open", "");
      this.place.querySelector("[aria-invalid=true]")?.focus();
      return;
    }
    this.close();
  }

  async save() {
    const { yaml } = await this.source.toYaml(this.nodes);
    const address = URL.createObjectURL(new Blob([yaml], { type: "text/yaml" }));
    h("a", { href: address, download: `${this.name}.yaml` }).click();
    URL.revokeObjectURL(address);
  }

  async load() {
    const [file] = this.file.files;
    if (!file) return;
    const text = file.size > MAX_FILE ? null : await file.text();
    this.file.value = ""; // so that the same file can be chosen again
    if (text === null) throw new Error(`${file.name}: larger than ${MAX_FILE} bytes`);
    this.nodes = (await this.source.fromYaml(text)).nodes;
    this.drawNodes();
    await this.check();
  }

  /** Open a node and lead there. */
  reveal(id) {
    const item = this.items.find((one) => one.node.id === id);
    if (!item) return;
    item.box.open = true;
    item.box.scrollIntoView({ block: "nearest" });
    item.box.querySelector("summary").focus({ preventScroll: true });
  }

  async attempt(act) {
    try {
      await act();
    } catch (error) {
      this.say(`${error.message}.`, true);
    }
  }

  say(text, isWrong) {
    this.status.textContent = text;
    this.status.className = isWrong ? "wrong" : "hint";
  }
}

const sourceOf = (text) => text.split(".")[0];
const mapValues = (object, change) => Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value)]));
