// The loss of every global batch, as it trains.

import { formatNumber, h, s } from "cards/dom";

const WIDTH = 600;
const HEIGHT = 110;
const MAX_POINTS = 400;

export function drawCurve(place, losses) {
  const finite = losses.filter((loss) => typeof loss === "number");
  place.hidden = finite.length < 2;
  if (place.hidden) return;
  const stride = Math.ceil(losses.length / MAX_POINTS);
  const points = means(losses, stride);
  const top = Math.max(...points.filter(Number.isFinite));
  const x = (index) => (index / Math.max(1, points.length - 1)) * WIDTH;
  const y = (value) => HEIGHT - (value / top) * HEIGHT;
  const steps = points.map((value, index) => (Number.isFinite(value) ? `${x(index).toFixed(1)},${y(value).toFixed(1)}` : ""));
  const mean = stride > 1 ? `, means of ${stride}` : "";
  const text = `Loss of each global batch${mean}: from ${formatNumber(losses[0])} to ${formatNumber(losses.at(-1))} after ${formatNumber(losses.length)} batches`;
  place.replaceChildren(
    h("p", { class: "caption" }, h("span", {}, `Loss of each global batch${mean}`), h("b", {}, formatNumber(losses.at(-1)))),
    h("div", { class: "plot" },
      h("span", { class: "tick" }, formatNumber(top)),
      s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text },
        s("polyline", { points: steps.join(" "), "vector-effect": "non-scaling-stroke" })),
      h("span", { class: "tick" }, "0")),
    h("p", { class: "caption hint" }, h("span", {}, "batch 1"), h("span", {}, `batch ${formatNumber(losses.length)}`)),
  );
}

function means(losses, stride) {
  const points = [];
  for (let start = 0; start < losses.length; start += stride) {
    const part = losses.slice(start, start + stride);
    points.push(part.reduce((sum, loss) => sum + loss, 0) / part.length); // NaN where one is no number
  }
  return points;
}
