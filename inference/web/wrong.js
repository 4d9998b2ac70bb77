// "Wrong?" beside an answer: which label is right, told to a server that takes corrections.

import { ApiError, call } from "./api.js";
import { duration, element } from "./format.js";

const [box, opener, form, choice, send, line] = [
  "wrong", "wrong-open", "wrong-form", "wrong-label", "wrong-send", "wrong-line",
].map((id) => document.getElementById(id));
let isTaken = false; // by the server, for its model
let labels = [];
let corrected = null; // the text, its answer's label and the id of the request

/** Show the control if the server takes corrections, and how long it keeps texts; `model` is what GET model says. */
export function wrongReady({ labels: known, model }) {
  isTaken = model?.feedback ?? false;
  labels = known;
  document.body.toggleAttribute("data-feedback", isTaken);
  const keptFor = model?.texts_kept_s;
  document.body.toggleAttribute("data-keeping", Boolean(keptFor));
  if (keptFor) document.getElementById("kept-for").textContent = duration(keptFor);
}

/** Offer to correct this answer; null takes the offer away. */
export function offerCorrection(answer) {
  corrected = answer;
  box.hidden = !isTaken;
  opener.hidden = !answer;
  line.textContent = "";
  line.classList.remove("error");
  close();
}

function close() {
  form.hidden = true;
  opener.setAttribute("aria-expanded", "false");
}

/** Let the visitor correct answers. */
export function startWrong() {
  opener.addEventListener("click", () => {
    const isOpening = form.hidden;
    if (!isOpening) return close();
    const others = labels.filter((label) => label !== corrected.label);
    choice.replaceChildren(element("option", { value: "" }, "Choose …"), ...others.map((label) => element("option", {}, label)));
    send.disabled = true;
    form.hidden = false;
    opener.setAttribute("aria-expanded", "true");
    choice.focus();
  });
  choice.addEventListener("change", () => (send.disabled = !choice.value));
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
    opener.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    correct(corrected, choice.value);
  });
}

async function correct(answer, label) {
  const { text, requestId } = answer;
  send.disabled = choice.disabled = true;
  let said = "Thanks. It is recorded.";
  let isError = false;
  try {
    await call("feedback", { body: { text, label, ...(requestId && { request_id: requestId }) } });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    [said, isError] = [error.message, true];
  }
  choice.disabled = false;
  if (answer !== corrected) return; // another text stands there by now
  line.classList.toggle("error", isError);
  line.textContent = said;
  send.disabled = !isError;
  if (isError) return;
  close();
  opener.hidden = true;
  line.focus(); // where the button was
}
