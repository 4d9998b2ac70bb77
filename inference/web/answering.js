// What a model's answer says: one label, several labels or a number, and what else was asked for. As
// inference/engines/answering.py; `info` is that of an opened model.

import { choose, members, operatingPoint, setRule } from "./calibration.js";

/** A prediction as the server gives it; `values` and `familiarity` are those of an answer of the model. */
export function meaning(info, { values, familiarity }, asked = {}) {
  return { ...fields(info, values), ...honest(info, values, familiarity, asked) };
}

function fields(info, values) {
  const { problemType, labels } = info;
  if (problemType === "regression") return { value: values[0] };
  const probabilities = Object.fromEntries(labels.map((label, i) => [label, values[i]]));
  if (problemType === "multi_label_classification") {
    return { labels: given(info, values).map((i) => labels[i]), probabilities };
  }
  const best = placeOfBest(values);
  return { label: labels[best], confidence: values[best], probabilities };
}

function given({ labels, thresholds }, values) {
  return [...labels.keys()].filter((i) => values[i] >= thresholds[i]).sort((a, b) => values[b] - values[a]);
}

function honest(info, values, familiarity, { coverage, max_error: maxError, familiarity: isAsked }) {
  const { calibration, labels } = info;
  const more = isAsked ? { familiarity } : {};
  if (coverage !== undefined) Object.assign(more, setOf(info, values, setRule(calibration, labels, coverage)));
  if (maxError !== undefined) {
    const isForeign = familiarity !== null && familiarity < calibration.familiarity.limit;
    Object.assign(more, decided(info, values, operatingPoint(calibration, labels, maxError), isForeign));
  }
  return more;
}

function setOf({ problemType, labels }, values, rule) {
  const { coverage, halfWidth } = rule;
  if (problemType === "regression") return { interval: [values[0] - halfWidth, values[0] + halfWidth], coverage };
  const found = members(rule, values);
  if (problemType === "multi_label_classification") return { set: found.map((i) => labels[i]), coverage };
  // The most probable of labels that exclude each other is in every set, and comes first.
  const best = placeOfBest(values);
  return { set: [best, ...found.filter((i) => i !== best)].map((i) => labels[i]), coverage };
}

function decided(info, values, point, isForeign) {
  const { problemType, labels } = info;
  if (problemType === "multi_label_classification") {
    // Where the point bounds a label, it alone decides, as it was certified; else the model does.
    const least = point.thresholds.map((own, i) => own || info.thresholds[i]);
    const sure = isForeign ? [] : given({ labels, thresholds: least }, values);
    const abstained = isForeign ? "unfamiliar" : given(info, values).length && !sure.length ? "uncertain" : null;
    return { labels: sure.map((i) => labels[i]), abstained };
  }
  const [best, isSure] = choose(point, values);
  if (isForeign || !isSure) return { label: null, abstained: isForeign ? "unfamiliar" : "uncertain" };
  return { label: labels[best], confidence: values[best], abstained: null };
}

export function placeOfBest(values) {
  return values.indexOf(Math.max(...values));
}
