// How unlike the training texts a text is. As common/familiarity.py, which says why, number for number.

const NATS_PER_LEVEL = 1 / 12;
const PRIOR = 20;
const LEAST_SPREAD = 0.05;

export class Familiarity {
  /** `record` is what the manifest has of it, `table` the bytes of familiarity.bin. */
  constructor(record, table, problemType) {
    const { vocabulary, tokens } = record;
    Object.assign(this, { record, problemType, pairs: table.subarray(vocabulary) });
    this.rarity = Float64Array.from(table.subarray(0, vocabulary), (level) => level * NATS_PER_LEVEL);
    this.usual = this.rarity.map((rarity) => PRIOR * Math.exp(-rarity));
    this.logSeen = this.rarity.map((rarity) => Math.log(tokens * Math.exp(-rarity) + PRIOR));
  }

  /** The share of held-out texts that are no more familiar than the one with these ids and calibrated scores. */
  of(ids, scores) {
    const inner = Math.max(1, ids.length - 2); // tokens but for the two special ones
    const usual = this.record.by_length.map(([constant, linear, square]) => constant + (linear + square / inner) / inner);
    let strange = (this.#surprise(ids) / inner - usual[0]) / Math.max(usual[1], LEAST_SPREAD);
    if (usual.length === 4) strange -= (this.#evidence(scores) - usual[2]) / Math.max(usual[3], LEAST_SPREAD);
    return interpolated(strange, ...this.record.quantiles);
  }

  #surprise(ids) {
    if (ids.length < 3) return 0;
    const [first, ...others] = ids.slice(1, -1).map((id) => Math.min(id, this.rarity.length - 1));
    let [before, sum] = [first, this.rarity[first]];
    for (const after of others) {
      sum += this.logSeen[before] - Math.log(this.#times(before, after) + this.usual[after]);
      before = after;
    }
    return sum;
  }

  #times(before, after) {
    const mixed = mix(before, after);
    const found = this.pairs[mixed & (this.pairs.length - 1)];
    const level = found & 15;
    return level && found >> 4 === mixed >>> 28 ? 2 ** (level - 0.5) : 0;
  }

  #evidence(scores) {
    if (this.problemType === "single_label_classification") return logSum(scores);
    return scores.reduce((sum, score) => sum + logSum([0, score]), 0);
  }
}

function logSum(scores) {
  const largest = Math.max(...scores);
  return largest + Math.log(scores.reduce((sum, score) => sum + Math.exp(score - largest), 0));
}

// In 32 bits: Math.imul multiplies so, and >>> shifts numbers without a sign.
function mix(before, after) {
  let mixed = Math.imul(before, 0x9e3779b1) ^ Math.imul(after, 0x85ebca77);
  mixed = Math.imul(mixed ^ (mixed >>> 15), 0x2c1b3c6d);
  return mixed ^ (mixed >>> 12);
}

// As np.interp: `places` rise, and beyond their ends the end's value holds.
function interpolated(at, places, values) {
  const next = places.findIndex((place) => place > at);
  if (next === 0) return values[0];
  if (next < 0) return values.at(-1);
  const slope = (values[next] - values[next - 1]) / (places[next] - places[next - 1]);
  return slope * (at - places[next - 1]) + values[next - 1];
}
