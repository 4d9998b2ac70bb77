// Rows of the data: whose they are, what they cost, who counted them.

import { formatNumber, h, rankClass } from "cards/dom";

/** A strip in the order of the data set, and the global batches of the first epoch, a line each. */
export function drawShards({ batches, owners: ranks, test_rows: testRows, rows }, workers) {
  const owners = new Map(batches.flatMap((batch, number) => batch.map((row, index) => [row, ranks[number][index]])));
  const tests = new Set(testRows);
  const shown = owners.size + tests.size;
  const shares = (some) => Array.from({ length: workers }, (_, rank) => some.filter((row) => owners.get(row) === rank));
  const counts = shares([...owners.keys()]).map((own, rank) => `rank ${rank} has ${own.length}`).join(", ");
  const dealt = (batch) => shares(batch).map((own, rank) => `rank ${rank} takes rows ${own.join(", ") || "none"}`).join("; ");
  const known = Array.from({ length: rows }, (_, row) => row).filter((row) => owners.has(row) || tests.has(row));
  return [
    legend(workers),
    h("h3", {}, "In the order of the data set"),
    shown < rows ? h("p", { class: "hint" }, `${formatNumber(shown)} of ${formatNumber(rows)} rows, those of the first batches`) : null,
    h("div", { class: "strip", role: "img", "aria-label": `${owners.size} rows to train on, of which ${counts}; ${tests.size} rows to test on` },
      known.map((row) => cell(row, owners.get(row), ""))),
    h("h3", {}, "In the order of the first epoch, a global batch a line"),
    h("ol", { class: "batches" },
      batches.map((batch, number) => h("li", { "aria-label": `Batch ${number + 1}: ${dealt(batch)}` },
        h("span", { class: "tick" }, String(number + 1)),
        h("div", { class: "strip" }, batch.map((row) => cell(row, owners.get(row), String(row))))))),
  ].filter(Boolean);
}

function cell(row, rank, text) {
  const owner = rank === undefined ? "kept for the test" : `rank ${rank}`;
  return h("i", { class: rank === undefined ? "rank test" : rankClass(rank), title: `row ${row}: ${owner}` }, text);
}

function legend(workers) {
  const ranks = Array.from({ length: workers }, (_, rank) => h("li", {}, h("i", { class: rankClass(rank) }), `rank ${rank}`));
  return h("ul", { class: "legend" }, ranks, h("li", {}, h("i", { class: "rank test" }), "test"));
}

/** Each rank's part of the global batch, with the loss of every row. */
export function drawBatch(batch, maxRows) {
  const losses = batch.flatMap((part) => part.loss).filter(Number.isFinite);
  const top = Math.max(...losses, 1e-9);
  const line = (part, index) => h("li", { title: `features ${part.features[index].map(formatNumber).join(", ")}` },
    h("span", { class: "tick" }, `row ${part.row[index]}`),
    h("span", { class: "tick" }, `class ${part.label[index]}`),
    h("span", { class: "meter" }, h("i", { "--share": Number.isFinite(part.loss[index]) ? part.loss[index] / top : 1 })),
    h("span", { class: "value" }, formatNumber(part.loss[index])));
  const rank = (part, number) => h("section", { class: "of-rank" },
    h("h4", {}, h("i", { class: rankClass(number) }), `rank ${number}`),
    h("ol", { class: "losses" }, part.row.map((_, index) => line(part, index))),
    part.row.length ? null : h("p", { class: "hint" }, "no row of this batch"),
    part.row.length === maxRows ? h("p", { class: "hint" }, `the first ${maxRows}`) : null);
  return [h("h3", {}, "The rows of each rank, and the loss of each row"), h("div", { class: "ranks" }, batch.map(rank))];
}

/** How many test rows each rank took, and how many of them it got right. */
export function drawCounts(counts) {
  const top = Math.max(...counts.map((count) => count.rows), 1);
  const line = ({ rows, correct }, rank) => h("li", {},
    h("span", { class: "tick" }, h("i", { class: rankClass(rank) }), ` rank ${rank}`),
    h("span", { class: "meter" }, h("i", { "--share": rows / top, class: "all" }), h("i", { "--share": correct / top })),
    h("span", { class: "value" }, `${correct} of ${rows} right`));
  const total = (name) => counts.reduce((sum, count) => sum + count[name], 0);
  return [
    h("h3", {}, "The test rows of each rank"),
    h("ol", { class: "losses counts" }, counts.map(line)),
    h("p", { class: "hint" }, `Summed over the ranks: ${total("correct")} of ${total("rows")} right.`),
  ];
}
