// The wiring as a graph: cards by levels, the training loop as a ring, and the lines between them.

import { formatNumber, formatSeconds, h, plural, rankClass, s } from "cards/dom";

const MARKS = { waiting: "·", running: "▶", done: "✓", failed: "✗" };
const EVERY_BATCH = "every batch of every epoch ↻";
const COLUMNS = 12;
const LANE = 7; // between two lines beside the cards
const BEND = 8;
const FRAME = 11; // around the loop
const LABEL = 20;

export class Wiring {
  constructor(place, onChoose) {
    this.onChoose = onChoose;
    this.list = place.querySelector("ol");
    this.svg = place.querySelector("svg");
    new ResizeObserver(() => this.drawLines()).observe(this.list);
  }

  build(pipeline) {
    this.pipeline = pipeline;
    this.loopText = s("text", { class: "loop", "text-anchor": "end" }, EVERY_BATCH);
    this.places = layOut(pipeline);
    this.buttons = new Map(pipeline.nodes.map((node, index) => [node.id, this.button(node, index + 1)]));
    this.list.replaceChildren(...pipeline.nodes.map((node) => this.item(node)));
    this.choose(this.buttons.has(this.chosen) ? this.chosen : pipeline.nodes[0].id);
  }

  item(node) {
    const { row, column, span } = this.places.get(node.id);
    const inLoop = this.pipeline.loop.includes(node.id);
    const kind = `${inLoop ? "in-loop" : ""} ${span < COLUMNS / 2 ? "narrow" : ""}`;
    return h("li", { "--row": row, "--column": column, "--span": span, class: kind }, this.buttons.get(node.id));
  }

  button(node, number) {
    const dots = Array.from({ length: this.pipeline.workers }, (_, rank) => h("i", { class: rankClass(rank) }));
    const isDistributed = node.execution_mode === "distributed";
    return h("button", { type: "button", class: "node", "data-id": node.id, onclick: () => this.choose(node.id, true) },
      h("span", { class: "number" }, String(number)),
      h("span", { class: "name" }, node.name),
      h("span", { class: "mark", "aria-hidden": "true" }),
      h("span", { class: "unseen state" }),
      h("span", { class: "facts" }),
      isDistributed ? h("span", { class: "dots", "aria-hidden": "true" }, dots) : null,
      h("span", { class: "unseen" }, isDistributed ? `runs on ${plural(this.pipeline.workers, "rank")}` : "runs once"));
  }

  /** Show a card; one chosen by hand is scrolled to. */
  choose(id, byHand = false) {
    this.chosen = id;
    for (const [other, button] of this.buttons) button.setAttribute("aria-current", String(other === id));
    this.drawLines();
    this.onChoose(this.pipeline.nodes.find((node) => node.id === id), byHand);
    // Where the card lies below the wiring, as on a telephone, lead there.
    const card = document.getElementById("card");
    if (byHand && card.getBoundingClientRect().top > innerHeight * 0.8) card.scrollIntoView({ block: "start" });
  }

  show(state) {
    const first = state.cards[this.pipeline.loop[0]];
    this.loopText.textContent = first?.epoch ? `epoch ${first.epoch} of ${state.epochs}, batch ${first.batch} ↻` : EVERY_BATCH;
    for (const [id, button] of this.buttons) {
      const card = state.cards[id];
      if (button.dataset.state !== card.state) {
        button.dataset.state = card.state;
        button.querySelector(".mark").textContent = MARKS[card.state];
        button.querySelector(".state").textContent = card.state;
      }
      const facts = this.facts(card);
      if (button.querySelector(".facts").textContent !== facts) button.querySelector(".facts").textContent = facts;
    }
  }

  facts(card) {
    if (card.state === "waiting") return "";
    const parts = card.seconds ? [formatSeconds(card.seconds)] : [];
    if ("accuracy" in card.metrics) parts.push(`${(card.metrics.accuracy * 100).toFixed(1)}%`);
    else if ("loss" in card.metrics) parts.push(`loss ${formatNumber(card.metrics.loss)}`);
    return parts.join(" · ");
  }

  drawLines() {
    const frame = this.svg.getBoundingClientRect();
    if (!this.pipeline || !frame.width) return;
    const boxes = new Map([...this.buttons].map(([id, button]) => [id, boxOf(button, frame)]));
    const lanes = { left: 0, right: 0 };
    const lines = this.edges().map(({ from, to, isBack }) => {
      const isOn = this.chosen === from || this.chosen === to;
      const d = this.path(from, to, boxes, frame.width, lanes);
      return s("path", { d, class: `${isBack ? "back" : ""} ${isOn ? "on" : ""}`, "marker-end": `url(#${isOn ? "tip-on" : "tip"})` });
    });
    lines.sort((one, other) => one.matches(".on") - other.matches(".on")); // those of the chosen card above the others
    this.svg.replaceChildren(s("defs", {}, tip("tip"), tip("tip-on")), ...this.loopFrame(boxes), ...lines);
  }

  edges() {
    const edges = this.pipeline.nodes.flatMap((node) =>
      Object.values(node.inputs).map((source) => ({ from: source.node, to: node.id, isBack: false })));
    const loop = this.pipeline.loop;
    return loop.length > 1 ? [...edges, { from: loop.at(-1), to: loop[0], isBack: true }] : edges;
  }

  path(from, to, boxes, width, lanes) {
    const [a, b] = [boxes.get(from), boxes.get(to)];
    const [rowA, rowB] = [this.places.get(from).row, this.places.get(to).row];
    if (rowA === rowB) {
      const side = a.x < b.x ? 1 : -1;
      return `M${a.x + (side * a.width) / 2},${a.y} L${b.x - side * (b.width / 2 + 2)},${b.y}`;
    }
    if (Math.abs(rowA - rowB) === 1) {
      const side = rowA < rowB ? 1 : -1;
      const [start, end] = [a.y + (side * a.height) / 2, b.y - side * (b.height / 2 + 2)];
      const middle = (start + end) / 2;
      return `M${a.x},${start} C${a.x},${middle} ${b.x},${middle} ${b.x},${end}`;
    }
    // Past the cards between them.
    const side = Math.min(a.x, b.x) < width / 2 - 5 ? "left" : "right";
    const sign = side === "left" ? -1 : 1;
    const edge = 3 + LANE * lanes[side]++;
    const x = side === "left" ? edge : width - edge;
    const [startX, endX] = [a.x + (sign * a.width) / 2, b.x + sign * (b.width / 2 + 2)];
    const corner = x - sign * BEND;
    return `M${startX},${a.y} H${corner} Q${x},${a.y} ${x},${a.y + BEND} V${b.y - BEND} Q${x},${b.y} ${corner},${b.y} H${endX}`;
  }

  loopFrame(boxes) {
    const inside = this.pipeline.loop.map((id) => boxes.get(id));
    if (!inside.length) return [];
    const left = Math.min(...inside.map((box) => box.x - box.width / 2)) - FRAME;
    const right = Math.max(...inside.map((box) => box.x + box.width / 2)) + FRAME;
    const top = Math.min(...inside.map((box) => box.y - box.height / 2)) - FRAME - LABEL;
    const bottom = Math.max(...inside.map((box) => box.y + box.height / 2)) + FRAME;
    return [
      s("rect", { class: "loop", x: left, y: top, width: right - left, height: bottom - top, rx: 14 }),
      s("g", { transform: `translate(${right - 12},${top + 17})` }, this.loopText),
    ];
  }
}

function boxOf(button, frame) {
  const { x, y, width, height } = button.getBoundingClientRect();
  return { x: x - frame.x + width / 2, y: y - frame.y + height / 2, width, height };
}

function tip(id) {
  return s("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" },
    s("path", { d: "M0,1 L7,4 L0,7 z" }));
}

/** Row and columns of every card: one level below the lowest that feeds it; the loop takes two rows, clockwise. */
function layOut(pipeline) {
  const rows = new Map();
  const { loop, nodes } = pipeline;
  const below = (node) => 1 + Math.max(0, ...Object.values(node.inputs).map((source) => rows.get(source.node) ?? 0));
  const inLoop = nodes.filter((node) => loop.includes(node.id));
  const half = Math.ceil(loop.length / 2);
  for (const node of nodes) {
    if (!loop.includes(node.id)) rows.set(node.id, below(node));
    else if (node.id === loop[0]) {
      const top = Math.max(...inLoop.map(below));
      loop.forEach((id, index) => rows.set(id, index < half ? top : top + 1));
    }
  }
  // What comes after the loop stands below all of it.
  const end = Math.max(0, ...loop.map((id) => rows.get(id)));
  const after = nodes.slice(nodes.findLastIndex((node) => loop.includes(node.id)) + 1);
  if (loop.length) for (const node of after) rows.set(node.id, Math.max(end + 1, below(node)));

  const places = new Map();
  for (const row of new Set(rows.values())) {
    const ids = nodes.map((node) => node.id).filter((id) => rows.get(id) === row);
    if (loop.includes(ids[0]) && row === end && row !== rows.get(loop[0])) ids.reverse();
    const span = Math.floor(COLUMNS / Math.max(2, ids.length));
    const start = 1 + Math.floor((COLUMNS - span * ids.length) / 2);
    ids.forEach((id, index) => places.set(id, { row, column: start + index * span, span }));
  }
  return places;
}
