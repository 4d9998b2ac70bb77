// What a calibrated model can promise. As the second half of common/calibration.py; `record` is what the manifest has.

const NEARLY = 1e-9; // two spellings of a share may differ so much

/** The scores whose probabilities are calibrated; without a calibration as they are. */
export function calibratedScores(record, scores) {
  if (!record) return scores;
  const { scale, offset, temperature = 1 } = record;
  return scores.map((score, i) => score * (scale?.[i] ?? 1 / temperature) + (offset?.[i] ?? 0));
}

/** The least coverage that was fitted and is at least this one, and how sets or intervals get it. */
export function setRule(record, labels, coverage) {
  const rule = record?.coverage.find((one) => one.coverage >= coverage - NEARLY);
  if (!rule) throw noGuarantee(`coverage ${coverage}`);
  const { own_thresholds: own, threshold, half_width: halfWidth } = rule;
  return { coverage: rule.coverage, halfWidth, thresholds: byLabel(labels, own, threshold) };
}

/** The labels of a set, the most probable first. */
export function members({ thresholds }, values) {
  return [...values.keys()].sort((a, b) => values[b] - values[a]).filter((i) => values[i] >= thresholds[i]);
}

/** The operating points that hold, [name, point]. */
export function heldPoints(record) {
  return Object.entries(record?.operating_points ?? {}).filter(([, one]) => one.threshold !== null);
}

/** An operating point by its name, or the loosest one that allows at most so many errors. */
export function operatingPoint(record, labels, wanted) {
  const fits = ([name, one]) => (typeof wanted === "string" ? name === wanted : one.max_error <= wanted + NEARLY);
  const [best] = heldPoints(record).filter(fits).sort(([, a], [, b]) => b.max_error - a.max_error);
  if (!best) throw noGuarantee(`max_error ${wanted}`);
  const { costs, threshold, thresholds } = best[1];
  return { costs, thresholds: costs ? [threshold] : byLabel(labels, thresholds, threshold) };
}

/** The label to answer with, and whether it is sure enough. */
export function choose({ costs, thresholds }, values) {
  if (!costs) {
    const best = values.indexOf(Math.max(...values));
    return [best, values[best] >= thresholds[best]];
  }
  const expected = values.map((_, label) => values.reduce((sum, value, i) => sum + value * costs[i][label], 0));
  const best = expected.indexOf(Math.min(...expected));
  return [best, expected[best] <= thresholds[0]];
}

function byLabel(labels, own = {}, other = 0) {
  return labels.map((label) => (Object.hasOwn(own, label) ? own[label] : other));
}

function noGuarantee(what) {
  return Object.assign(new Error(`${what} cannot be promised by this model`), { code: "no_guarantee" });
}
