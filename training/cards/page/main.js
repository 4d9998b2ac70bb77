// The page: the wiring on one side, the chosen card on the other, the run above them.

import { CardPanel } from "cards/card";
import { drawCurve } from "cards/curve";
import { h } from "cards/dom";
import { openSource } from "cards/source";
import { Wiring } from "cards/wiring";

const MOST_WORKERS = 8; // of the menu; a card can be set to more

const byId = (id) => document.getElementById(id);

class Page {
  constructor(source) {
    this.source = source;
    this.run = null; // its number: after a reset everything is new
    this.losses = [];
    this.panel = new CardPanel(byId("card"), source);
    this.wiring = new Wiring(byId("wiring"), (node) => this.panel.open(node, this.pipeline).catch((error) => this.complain(error)));
    this.queue = Promise.resolve();
  }

  start() {
    byId("controls").hidden = !this.source.isLive;
    byId("step").addEventListener("click", () => this.step());
    byId("run-all").addEventListener("click", () => this.act(byId("run-all"), () => this.source.run()));
    byId("reset").addEventListener("click", () => this.act(byId("reset"), () => this.source.reset(this.workers)));
    byId("workers").addEventListener("change", () => this.act(byId("workers"), () => this.source.reset(this.workers)));
    // One after the other: a new run's wiring is asked for before its states are shown.
    const onState = (state) => (this.queue = this.queue.then(() => this.show(state)).catch((error) => this.complain(error)));
    this.source.follow(onState, () => {
      this.run = null; // when it answers again, it may be another server
      this.complain(new Error("the server does not answer"));
    });
  }

  get workers() {
    return Number(byId("workers").value);
  }

  async step() {
    const next = this.state?.next;
    if (await this.act(byId("step"), () => this.source.step())) this.wiring.choose(next);
  }

  async act(button, ask) {
    if (button.getAttribute("aria-disabled") === "true") return false;
    try {
      await ask();
      return true;
    } catch (error) {
      this.complain(error);
      return false;
    }
  }

  async show(state) {
    if (state.run !== this.run) await this.begin(state.run);
    this.losses = [...this.losses.slice(0, state.losses_from), ...state.losses];
    const before = this.state;
    this.state = state;
    this.wiring.show(state);
    drawCurve(byId("curve"), this.losses);
    this.showControls(state);
    await this.panel.show(state, before);
  }

  async begin(run) {
    this.pipeline = await this.source.pipeline();
    this.run = run;
    this.losses = [];
    this.state = null;
    this.wiring.build(this.pipeline);
    const { workers } = this.pipeline;
    const choices = Array.from({ length: Math.max(MOST_WORKERS, workers) }, (_, index) => index + 1);
    byId("workers").replaceChildren(...choices.map((count) => h("option", { value: count, selected: count === workers }, String(count))));
    byId("subtitle").textContent = this.describe();
  }

  describe() {
    const { name, nodes, workers } = this.pipeline;
    const cards = `${nodes.length} ${nodes.length === 1 ? "card" : "cards"}`;
    const ranks = `${workers} ${workers === 1 ? "rank" : "ranks"}, each a real process`;
    return this.source.isLive
      ? `The pipeline ${name}: ${cards}, ${ranks}. Step through it, and see what each rank holds before and after.`
      : `A run of the pipeline ${name}: ${cards}, ${ranks}. Choose a card to see what each rank held before and after.`;
  }

  showControls(state) {
    // Not disabled, which would take the focus away from whoever steps with the keyboard.
    const isOver = state.busy || state.failure !== "" || state.next === null;
    for (const id of ["step", "run-all"]) byId(id).setAttribute("aria-disabled", String(isOver));
    this.say(this.summary(state), state.failure !== "");
  }

  summary(state) {
    if (state.failure) return state.failure;
    if (state.next === null) return "All cards are done.";
    const { name } = this.pipeline.nodes.find((node) => node.id === state.next);
    if (!state.busy) return `Next: ${name}`;
    const { epoch } = state.cards[state.next];
    return epoch ? `Running: epoch ${epoch} of ${state.epochs}` : `Running: ${name}`;
  }

  complain(error) {
    this.say(`${error.message}.`, true);
  }

  say(text, isWrong) {
    if (byId("status").textContent !== text) byId("status").textContent = text;
    byId("status").classList.toggle("wrong", isWrong);
  }
}

export const start = () => new Page(openSource()).start();
