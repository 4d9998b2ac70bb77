// The chosen card: what to look at, what each rank held, what came out, and how it is set.

import { drawBatch, drawCounts, drawShards } from "cards/rows";
import { formatNumber, h, plural } from "cards/dom";
import { configForm } from "cards/form";
import { HeldView } from "cards/held";

export class CardPanel {
  constructor(place, source) {
    this.place = place;
    this.source = source;
    this.held = new HeldView();
  }

  /** Show another card, or the same of another run. */
  async open(node, pipeline) {
    [this.node, this.pipeline] = [node, pipeline];
    this.pass = undefined; // the latest
    this.drawFrame();
    await this.load();
  }

  /** Keep up with the run: what a card made is looked at anew when it is done, and when the run pauses. */
  async show(state, before) {
    const card = state.cards[this.node.id];
    this.message.textContent = card.state === "failed" ? card.message : "";
    const isNewlyDone = card.state === "done" && this.isEmpty;
    const hasPaused = !state.busy && before?.busy;
    const wasQuick = !state.busy && before && card.seconds !== before.cards[this.node.id].seconds;
    if (isNewlyDone || hasPaused || wasQuick) await this.load();
  }

  drawFrame() {
    const { node } = this;
    const flow = [
      ...Object.entries(node.inputs).map(([name, source]) => h("li", {}, "takes ", h("b", {}, name), ` from ${this.nameOf(source.node)}`)),
      ...Object.keys(node.gives).map((name) => h("li", {}, "gives ", h("b", {}, name))),
    ];
    const where = node.execution_mode === "local" ? "once, in the program's own process" : `on ${plural(this.pipeline.workers, "rank")}`;
    this.message = h("p", { class: "wrong failure", role: "alert" });
    this.content = h("div", { class: "content" });
    const form = configForm(node, { isLive: this.source.isLive, configure: (values) => this.source.configure(node.id, values) });
    this.keepFocus(() => this.place.replaceChildren(...[
      h("h2", { id: "card-name" }, node.name),
      h("p", {}, node.description),
      node.look_at ? h("p", { class: "look" }, h("b", {}, "Look at: "), node.look_at) : null,
      this.message,
      this.content,
      ...(form ? [h("h3", {}, "Configuration"), form] : []),
      h("h3", {}, "Wiring"),
      h("ul", { class: "flow" }, h("li", {}, `runs ${where}`), flow)].filter(Boolean)));
  }

  nameOf(id) {
    return this.pipeline.nodes.find((node) => node.id === id).name;
  }

  async load() {
    const { node } = this;
    const pictures = await this.source.pictures(node.id);
    if (node === this.node) this.drawPictures(pictures);
  }

  drawPictures(pictures) {
    this.isEmpty = !pictures.length;
    if (this.isEmpty) {
      this.content.replaceChildren(h("p", { class: "hint" }, "Nothing has come out of this card."));
      return;
    }
    const picture = pictures.find((one) => one.pass === this.pass) ?? pictures.at(-1);
    this.keepFocus(() => this.content.replaceChildren(
      this.passes(pictures, picture),
      ...this.drawings(picture),
      h("h3", {}, "What came out"),
      drawPreview(picture.preview)));
  }

  /** The pass of the training loop that is shown, and the others that were kept. */
  passes(pictures, shown) {
    if (pictures.length === 1) return h("p", { class: "hint", hidden: !shown.pass }, shown.pass);
    const choose = (pass) => {
      this.pass = pass;
      this.drawPictures(pictures);
    };
    const button = ({ pass }, index) =>
      h("button", { type: "button", id: `pass-${index}`, "aria-pressed": String(pass === shown.pass), onclick: () => choose(pass) }, pass);
    return h("div", { class: "choices", role: "group", "aria-label": "Pass of the training loop" }, pictures.map(button));
  }

  drawings({ shards, batch, max_rows: maxRows, counts, held }) {
    if (shards) return drawShards(shards, this.pipeline.workers);
    if (batch) return drawBatch(batch, maxRows);
    if (counts) return drawCounts(counts);
    return held ? [this.held.draw(held)] : [];
  }

  /** Draw anew without taking the focus from whoever uses the keyboard. */
  keepFocus(draw) {
    const id = this.place.contains(document.activeElement) ? document.activeElement.id : "";
    draw();
    if (id) document.getElementById(id)?.focus({ preventScroll: true });
  }
}

/** As the card's view says: facts and a table, large figures over the table, or the total of a model below it. */
function drawPreview({ view, summary, columns, rows }) {
  const isNumber = (value) => typeof value === "number";
  const facts = Object.entries(summary).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, formatNumber(value))));
  const cell = (value) => h("td", { class: isNumber(value) ? "number" : "" }, formatNumber(value));
  const heading = (name, index) => h("th", { scope: "col", class: rows.every((row) => isNumber(row[index])) ? "number" : "" }, name);
  return h("div", { class: "preview" },
    facts.length ? h("dl", { class: view === "metrics" ? "figures" : "facts" }, facts) : null,
    rows.length
      ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Preview" },
          h("table", {},
            h("thead", {}, h("tr", {}, columns.map(heading))),
            h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))),
            view === "model_summary" ? totalOf(columns, rows) : null))
      : null);
}

function totalOf(columns, rows) {
  const counted = columns.indexOf("parameters");
  const total = rows.reduce((sum, row) => sum + row[counted], 0);
  const rest = columns.slice(1).map((name, index) => h("td", { class: "number" }, index + 1 === counted ? formatNumber(total) : ""));
  return h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "total"), rest));
}
