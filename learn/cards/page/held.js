// What each rank held of parameters or gradients: heat maps side by side, and which tensors are equal on all ranks.

import { formatNumber, h, rankClass, s } from "cards/dom";

const MAX_SIDE = 32; // of a tensor that is sent

export class HeldView {
  constructor() {
    this.chosen = {}; // tensor, by kind
  }

  draw(held) {
    const place = h("div", { class: "held" });
    this.fill(place, held);
    return place;
  }

  fill(place, held) {
    const names = Object.keys(held.whole);
    const name = names.includes(this.chosen[held.kind]) ? this.chosen[held.kind] : names[0];
    const choose = (event) => {
      this.chosen[held.kind] = event.target.value;
      this.fill(place, held);
      place.querySelector("select").focus({ preventScroll: true });
    };
    const option = (one) => h("option", { value: one, selected: one === name }, `${one}  (${held.whole[one].join(" × ")})`);
    const top = largest(held, name);
    const readout = h("output", { class: "readout" }, "Point at a cell, or walk over a map with the arrow keys.");
    place.replaceChildren(
      h("div", { class: "choose" },
        h("label", {}, `${held.kind} of `, h("select", { id: "tensor", onchange: choose }, names.map(option))),
        scale(top)),
      h("div", { class: "moments" }, held.moments.map((moment) => this.moment(moment, held, name, top, readout))),
      readout,
      h("h3", {}, "Equal on all ranks?"),
      equality(held, names));
  }

  moment({ title, ranks }, held, name, top, readout) {
    const maps = ranks.map((tensors, rank) => heatMap(tensors[name], { rank, title, whole: held.whole[name], top, readout, first: ranks[0][name] }));
    const verdict = compare(ranks.map((tensors) => tensors[name]), held.whole[name]);
    return h("section", { class: "moment" },
      h("h3", {}, title, " ", h("span", { class: `verdict ${verdict.kind}` }, verdict.text)),
      h("div", { class: "ranks", "--columns": widthOf(held.whole[name]) }, maps));
  }
}

function largest(held, name) {
  const values = held.moments.flatMap(({ ranks }) => ranks.flatMap((tensors) => tensors[name].values.flat()));
  return Math.max(...values.filter(Number.isFinite).map(Math.abs), 1e-30);
}

/** Whether the ranks hold the same: by the checksums of all bytes, not by what is drawn. */
function compare(tensors, whole) {
  if (tensors.some(({ shape }) => shape[0] !== whole[0])) return { kind: "slices", text: "slices" };
  const different = new Set(tensors.map(({ checksum }) => checksum)).size;
  return different === 1 ? { kind: "equal", text: "= equal" } : { kind: "different", text: `≠ ${different} different` };
}

function equality({ moments, whole }, names) {
  const cell = (ranks, name) => {
    const tensors = ranks.map((held) => held[name]);
    const verdict = compare(tensors, whole[name]);
    const sums = tensors.map(({ checksum }, rank) => `rank ${rank}: ${checksum}`).join("\n");
    const sum = verdict.kind === "equal" ? h("code", {}, tensors[0].checksum.slice(0, 6)) : null;
    return h("td", { title: sums }, h("span", { class: `verdict ${verdict.kind}` }, verdict.text), " ", sum);
  };
  const heads = ["tensor", ...moments.map(({ title }) => title)];
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Which tensors are equal on all ranks" },
    h("table", { class: "equality" },
      h("thead", {}, h("tr", {}, heads.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), moments.map(({ ranks }) => cell(ranks, name)))))));
}

function scale(top) {
  return h("div", { class: "scale", role: "img", "aria-label": `Colours from minus ${formatNumber(top)} over 0 to ${formatNumber(top)}` },
    h("span", {}, `−${formatNumber(top)}`), h("i", {}), h("span", {}, formatNumber(top)));
}

/** A rank's tensor, a cell a number; a slice stands at its place in the whole. */
function heatMap(tensor, { rank, title, whole, top, readout, first }) {
  const { values, shape, checksum, first_row: firstRow } = tensor;
  const fits = whole[0] <= MAX_SIDE;
  const [height, offset] = fits ? [whole[0], firstRow] : [Math.max(1, values.length), 0];
  const width = widthOf(whole);
  const cells = values.flatMap((row, y) => row.map((value, x) => s("rect", { x, y: y + offset, width: 1, height: 1, ...colour(value, top) })));
  const cursor = s("rect", { class: "cursor", width: 1, height: 1, visibility: "hidden" });
  const label = `rank ${rank}, ${title}: ${shape.join(" by ")} numbers, checksum ${checksum}`;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "xMinYMin", tabindex: 0, role: "img", "aria-label": label, class: "map", "--rows": height },
    cells, s("rect", { class: "frame", width, height }), cursor);
  followCells(svg, values, offset, (y, x) => {
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x", x);
    cursor.setAttribute("y", y + offset);
    const column = shape.length > 1 ? `, column ${x}` : "";
    readout.textContent = `rank ${rank}, ${title}: row ${y + firstRow}${column}: ${values[y][x]}`;
  }, () => cursor.setAttribute("visibility", "hidden"));
  const isPart = shape[0] > values.length || (shape[1] ?? 1) > values[0]?.length;
  const differs = checksum !== first.checksum && shape[0] === whole[0];
  return h("figure", {},
    h("figcaption", {}, h("i", { class: rankClass(rank) }), `rank ${rank}`),
    svg,
    h("code", { class: differs ? "differs" : "", title: "checksum of all bytes" }, checksum.slice(0, 6)),
    isPart ? h("p", { class: "hint" }, `first ${values.length} × ${values[0].length} of ${shape.join(" × ")}`) : null,
    values.length ? null : h("p", { class: "hint" }, "holds none of it"));
}

const widthOf = (whole) => Math.min(whole[1] ?? 1, MAX_SIDE);

function colour(value, top) {
  if (!Number.isFinite(value)) return { class: "cell not-finite" };
  return { class: value < 0 ? "cell negative" : "cell positive", "--strength": Math.abs(value) / top };
}

/** Tell which cell is pointed at, by mouse, finger or arrow keys. */
function followCells(svg, values, offset, onCell, onLeave) {
  const at = { x: 0, y: 0 };
  const go = (y, x) => {
    if (values[y]?.[x] === undefined) return;
    Object.assign(at, { x, y });
    onCell(y, x);
  };
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    go(Math.floor(point.y) - offset, Math.floor(point.x));
  });
  svg.addEventListener("pointerleave", onLeave);
  svg.addEventListener("focus", () => svg.matches(":focus-visible") && go(at.y, at.x));
  svg.addEventListener("blur", onLeave);
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  svg.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    go(at.y + move[0], at.x + move[1]);
  });
}
