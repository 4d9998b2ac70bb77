// node run_wordpiece.mjs: reads {settings, texts} from standard input and prints for each text its cleaned form, its token
// ids, how many tokens it has and whether it was cut.
import { text } from "node:stream/consumers";
import { Tokenizer } from "../../../inference/web/wordpiece.js";

const { settings, texts } = JSON.parse(await text(process.stdin));
const tokenizer = new Tokenizer(settings);
const answers = texts.map((one) => {
  const cleaned = tokenizer.clean(one);
  const { ids, tokens, truncated } = tokenizer.encode(cleaned);
  return [cleaned, ids, tokens, truncated];
});
process.stdout.write(JSON.stringify(answers));
