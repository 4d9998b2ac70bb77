// The page's beginning: the examples, and everything else set going.

import { answerWith } from "./api.js";
import { startFile } from "./file.js";
import { element } from "./format.js";
import { modelReady, setText, startLive } from "./live.js";
import { promiseReady } from "./promise.js";
import { onReady, watch } from "./server.js";
import { startWrong, wrongReady } from "./wrong.js";

const EXAMPLES = [
  ["Cease-fire talks", "Ministers meet in Geneva for talks on a cease-fire"],
  ["Football in court", "Court fines football league over television rights"],
  ["Falling shares", "Shares in the carmaker fall after it recalls two million vans"],
  ["A telescope", "New space telescope finds water vapour around a distant planet"],
  ["Football meets oil", "Football club sold to oil billionaire for a record sum"],
  ["Chips and profits", "Chip maker cuts its profit forecast as rivals release faster processors for phones"],
];

document.getElementById("examples").append(
  ...EXAMPLES.map(([name, text]) => {
    const chip = element("button", { type: "button", class: "chip", title: text }, name);
    chip.addEventListener("click", () => setText(text));
    return element("li", {}, chip);
  }),
);
if (document.body.dataset.model) answerWith((await import("./local.js")).answer);
onReady(promiseReady); // before what asks
onReady(wrongReady);
onReady(modelReady);
startLive();
startFile();
startWrong();
watch();
