// Starts the parts of the page.

import { answerWith } from "./api.js";
import { startFile } from "./file.js";
import { modelReady, startLive } from "./live.js";
import { promiseReady } from "./promise.js";
import { onReady, watch } from "./server.js";
import { startUse } from "./use.js";
import { startWrong, wrongReady } from "./wrong.js";

if (document.body.dataset.model) answerWith((await import("./local.js")).answer);
onReady(promiseReady); // before what asks
onReady(wrongReady);
onReady(modelReady);
startLive();
startFile();
startWrong();
startUse();
watch();
