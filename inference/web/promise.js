// When a calibrated model answers, and when it rather says nothing: the visitor's choice, and what is said then.

import { heldPoints } from "./calibration.js";
import { count, element, percent } from "./format.js";

const OFFERED = [0.01, 0.02, 0.05]; // largest shares of wrong answers
const USUAL = 0.02;
const COVERAGE = 0.95;
const MOST_NAMED = 3;

const [box, choice, line] = ["promise", "max-error", "promise-line"].map((id) => document.getElementById(id));
let known = null; // the calibration of a model that bounds the share of wrong answers
let leastFamiliar = null; // below it, a text is not like those that the model knows; null if it cannot tell
let levels = new Map(); // its operating points by that bound

/** Offer what the model can promise; `calibration` is that of GET model. */
export function promiseReady({ model }) {
  const bounds = heldPoints(model?.calibration).filter(([, one]) => one.max_error);
  levels = new Map(bounds.map(([, one]) => [one.max_error, one]));
  const before = known && choice.value;
  leastFamiliar = model?.calibration?.familiarity?.limit ?? null;
  known = levels.size ? model.calibration : null;
  box.hidden = !known;
  if (!known) return;
  const usual = levels.has(USUAL) ? USUAL : Math.min(...levels.keys());
  const offered = [...new Set([usual, ...OFFERED])].filter((level) => levels.has(level)).sort((a, b) => a - b);
  choice.replaceChildren(
    element("option", { value: "" }, "Always"),
    ...offered.map((level) => element("option", { value: level }, `Only if at most ${short(level)} are wrong`)),
  );
  choice.value = before ?? usual;
  if (choice.selectedIndex < 0) choice.value = usual; // another model cannot promise what was chosen
  showLine();
}

/** Call `listener` when the visitor has chosen otherwise. */
export function onChoice(listener) {
  choice.addEventListener("change", () => {
    showLine();
    listener();
  });
}

/** What a request asks for in addition to the answer. */
export function asked() {
  const more = leastFamiliar !== null ? { familiarity: true } : {};
  if (!known || !choice.value) return more;
  return { max_error: Number(choice.value), coverage: heldCoverage(), ...more };
}

function heldCoverage() {
  return (known.coverage.find((one) => one.coverage >= COVERAGE) ?? known.coverage.at(-1))?.coverage;
}

function showLine() {
  const point = levels.get(Number(choice.value));
  if (!point) {
    line.textContent = "It names the likeliest label, however unsure it is.";
    return;
  }
  const named = known.coverage.length ? `, and what it names includes the right label for ${short(heldCoverage())}` : "";
  line.textContent =
    `When it answers, at most ${short(point.max_error)} of its answers are wrong on texts like the ` +
    `${count(known.rows)} rows it was measured on. It answers ${short(point.answered)} of them${named}.`;
}

/** What stands in the place of a label; empty if the model answers. */
export function silence({ abstained, set = [] }) {
  if (abstained === "unfamiliar") return "Not like the texts this model knows";
  if (!abstained) return "";
  if (set.length === 1) return `Not sure, maybe ${set[0]}`;
  if (set.length > MOST_NAMED) return `Not sure: one of ${set.length} labels`;
  return set.length ? `Not sure: ${new Intl.ListFormat("en", { type: "disjunction" }).format(set)}` : "Not sure";
}

/** A warning where the model answers a text that is not like those that it knows. */
export function doubt({ familiarity }) {
  return familiarity < leastFamiliar ? `Mostly unknown to this model: ${rankOf(familiarity)} Do not trust the answer.` : "";
}

function rankOf(familiarity) {
  return `less familiar than ${Number((100 - 100 * familiarity).toFixed(2))}% of ordinary texts.`;
}

/** Why the model does not answer, in a sentence. */
export function reasonOf({ abstained, familiarity, confidence }) {
  if (abstained === "unfamiliar") {
    return familiarity === undefined ? "" : rankOf(familiarity).replace("less", "Less");
  }
  const point = levels.get(Number(choice.value));
  if (!point) return "This server is set to answer only when the model is surer.";
  return `${percent(confidence)} sure; it answers from ${percent(point.threshold)} on.`;
}

// 0.02 as "2%", 0.7213 as "72.1%".
function short(share) {
  return `${Number((share * 100).toPrecision(3))}%`;
}
