// Elements in one call: h("p", {class: "hint", onclick: act, "--share": 0.5}, "text", child).

const SVG = "http://www.w3.org/2000/svg";

function build(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

export const h = (tag, properties = {}, ...children) => build(document.createElement(tag), properties, children);

export const s = (tag, properties = {}, ...children) =>
  build(document.createElementNS(SVG, tag), properties, children);

/** A rank's colour, and of the ninth rank and those after it stripes too. */
export const rankClass = (rank) => `rank rank-${rank % 8}${rank >= 8 ? " striped" : ""}`;

export const formatNumber = (value) =>
  typeof value !== "number" ? String(value) : Number.isInteger(value) ? value.toLocaleString("en") : shorten(value);

function shorten(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export const plural = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

export const formatSeconds = (seconds) =>
  seconds < 0.1 ? `${(seconds * 1000).toFixed(0)} ms` : seconds < 60 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
