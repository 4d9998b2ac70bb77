// Numbers as people read them, and the colour that belongs to a label.

const NUM_ACCENTS = 6;
const accents = new Map();

/** Give each label the accent of its place; later labels follow. */
export function learnLabels(labels) {
  for (const label of labels) {
    if (!accents.has(label)) accents.set(label, accents.size % NUM_ACCENTS);
  }
}

/** The accent of a label, for a data-accent attribute. */
export function accentOf(label) {
  learnLabels([label]);
  return accents.get(label);
}

/** 0.9734 as "97.3%"; what rounds to all or nothing says so. */
export function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1%";
  if (share < 1 && share >= 0.9995) return ">99.9%";
  return `${(share * 100).toFixed(1)}%`;
}

/** A probability's change in percentage points: "+36.2", "\u22120.7". */
export function points(change) {
  return `${change < 0 ? "\u2212" : "+"}${Math.abs(change * 100).toFixed(1)}`;
}

/** A model's number with six digits: "3.21408", "\u22121,250,000". */
export function number(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 6 }).replace("-", "\u2212");
}

/** A number's change with its sign, two digits of it. */
export function difference(change) {
  const size = Math.abs(change).toLocaleString("en", { maximumSignificantDigits: 2 });
  return `${change < 0 ? "\u2212" : "+"}${size}`;
}

/** A text's labels in one cell, as training reads them; names that would fall apart are written as a list. */
export function joined(labels, all) {
  return all.some((label) => /[,;|]|^\s*\[/.test(label)) ? JSON.stringify(labels) : labels.join("|");
}

/** Milliseconds with the digits that matter. */
export function milliseconds(value) {
  return `${value < 9.95 ? value.toFixed(1) : Math.round(value)} ms`;
}

/** 604800 as "7 days", in the largest unit of which it is a whole number. */
export function duration(seconds) {
  const units = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const [size, unit] = units.find(([size]) => seconds % size === 0);
  return `${count(seconds / size)} ${unit}${seconds === size ? "" : "s"}`;
}

/** 12345 as "12,345". */
export function count(value) {
  return value.toLocaleString("en");
}

/** "1 row", "12,345 rows". */
export function rows(number) {
  return `${count(number)} ${number === 1 ? "row" : "rows"}`;
}

/** A new element with attributes, text or children. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
