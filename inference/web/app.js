// The page's beginning: the examples, and everything else set going.

import { startFile } from "./file.js";
import { element } from "./format.js";
import { modelReady, setText, startLive } from "./live.js";
import { onReady, watch } from "./server.js";

const EXAMPLES = [
  ["Talks on a cease-fire", "Foreign ministers meet in Geneva as talks on a cease-fire enter a third day"],
  ["A cup final", "Striker scores twice in extra time as the visitors win the cup final on penalties"],
  ["Oil and shares", "Oil prices climb to a record and shares fall as traders fear a winter shortage"],
  ["A telescope", "Astronomers using a new space telescope find water vapour around a distant planet"],
  ["A close one", "Chip maker cuts its profit forecast as rivals release faster processors for phones"],
];

document.getElementById("examples").append(
  ...EXAMPLES.map(([name, text]) => {
    const chip = element("button", { type: "button", class: "chip", title: text }, name);
    chip.addEventListener("click", () => setText(text));
    return element("li", {}, chip);
  }),
);
onReady(modelReady);
startLive();
startFile();
watch();
