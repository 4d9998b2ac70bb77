// The page: the wiring on one side, the chosen card on the other, the run above them.

import { CardPanel } from "cards/card";
import { drawCurve } from "cards/curve";
import { h, plural } from "cards/dom";
import { Editor } from "cards/editor";
import { openSource } from "cards/source";
import { Wiring } from "cards/wiring";

const MAX_LISTED_WORKERS = 8; // of the menu; a card can be set to more
const BUTTONS = ["step", "run-all", "reset", "edit"];

const byId = (id) => document.getElementById(id);

class Page {
  constructor(source) {
    this.source = source;
    this.run = null; // its number: after a reset everything is new
    this.losses = [];
    this.panel = new CardPanel(byId("card"), source);
    this.wiring = new Wiring(byId("wiring"), (node, byHand) => this.choose(node, byHand));
    this.editor = new Editor(byId("editor"), source, (pipeline) => this.wiring.build(pipeline), () => this.endEditing());
    this.queue = Promise.resolve();
  }

  start() {
    byId("controls").hidden = !this.source.isLive;
    byId("how-to-run").hidden = this.source.isLive;
    byId("step").addEventListener("click", () => this.step());
    byId("run-all").addEventListener("click", () => this.act("run-all", () => this.source.run()));
    byId("reset").addEventListener("click", () => this.act("reset", () => this.source.reset(this.workers)));
    byId("edit").addEventListener("click", () => this.edit());
    byId("workers").addEventListener("change", () => this.nameReset());
    // One after the other: a new run's wiring is asked for before its states are shown.
    const onState = (state) => (this.queue = this.queue.then(() => this.show(state)).catch((error) => this.complain(error)));
    this.source.follow(onState, (error) => {
      this.run = null; // when it answers again, it may be another server
      this.enable([]);
      this.complain(error);
    });
  }

  get hasShards() {
    return this.pipeline.nodes.some((node) => node.card_type === "dist_shard_data");
  }

  /** That are asked for: the shard card's number, and without such a card none. */
  get workers() {
    return this.hasShards ? Number(byId("workers").value) : undefined;
  }

  nameReset() {
    byId("reset").textContent = this.workers === this.pipeline.workers ? "Reset" : `Reset to ${plural(this.workers, "worker")}`;
  }

  async step() {
    const next = this.state?.next;
    if (await this.act("step", () => this.source.step())) this.wiring.choose(next);
  }

  /** Ask for one thing at a time; the next state tells what came of it, and what can be asked for then. */
  async act(id, ask) {
    if (byId(id).getAttribute("aria-disabled") === "true") return false;
    this.enable([]);
    try {
      await ask();
      return true;
    } catch (error) {
      this.showControls(this.state);
      this.complain(error);
      return false;
    }
  }

  choose(node, byHand) {
    if (!this.editor.isOpen) this.panel.open(node, this.pipeline).catch((error) => this.complain(error));
    else if (byHand) this.editor.reveal(node.id);
  }

  async edit() {
    if (!(await this.act("edit", () => this.editor.open(this.pipeline)))) return;
    for (const id of ["controls", "curve", "card"]) byId(id).hidden = true;
  }

  async endEditing() {
    byId("controls").hidden = byId("card").hidden = false;
    this.run = null; // draw everything as it is now: another page may have started over
    await (this.queue = this.queue.then(() => this.show(this.state)).catch((error) => this.complain(error)));
    byId("edit").focus();
  }

  // Not disabled, which would take the focus away from whoever steps with the keyboard.
  enable(ids) {
    for (const id of BUTTONS) byId(id).setAttribute("aria-disabled", String(!ids.includes(id)));
  }

  async show(state) {
    if (this.editor.isOpen) {
      this.losses = [...this.losses.slice(0, state.losses_from), ...state.losses];
      this.state = state;
      return;
    }
    const before = state.run === this.run ? this.state : null;
    if (!before) await this.begin(state.run);
    this.losses = [...this.losses.slice(0, state.losses_from), ...state.losses];
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
    this.wiring.build(this.pipeline);
    const { workers } = this.pipeline;
    const choices = Array.from({ length: Math.max(MAX_LISTED_WORKERS, workers) }, (_, index) => index + 1);
    byId("workers").replaceChildren(...choices.map((choice) => h("option", { value: choice, selected: choice === workers }, String(choice))));
    byId("choose-workers").hidden = !this.hasShards;
    byId("reset").textContent = "Reset";
    byId("subtitle").textContent = this.describe();
  }

  describe() {
    const { name, nodes, workers } = this.pipeline;
    const ranks = `, ${plural(workers, "rank")}, each a real process`;
    const size = `${plural(nodes.length, "card")}${this.hasShards ? ranks : ""}`;
    return this.source.isLive
      ? `The pipeline ${name}: ${size}. Step through it, and see what comes out of each card.`
      : `A recorded run of the pipeline ${name}: ${size}. Choose a card to see what came out of it.`;
  }

  showControls(state) {
    const isOver = state.failure !== "" || state.next === null;
    this.enable(state.busy ? ["reset"] : isOver ? ["reset", "edit"] : BUTTONS);
    this.say(this.summary(state), state.failure !== "");
  }

  summary(state) {
    if (state.failure) return state.failure;
    // With shards there is a card for the strategy, too.
    const more = this.hasShards ? " Try another number of workers, or FSDP (Edit wiring)." : "";
    if (state.next === null) return `All cards are done.${more}`;
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
