// Colours of a terminal in a log: escape sequences become classes; those that move the cursor are left out.

const ESCAPE = /\x1b(?:\[([0-?]*)[ -\/]*([@-~])|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -\/]*[0-~])/g;
const NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

/** The look after the numbers of a sequence `m`. */
function turned(look, numbers) {
  let now = look;
  for (let n = 0; n < numbers.length; n++) {
    const code = numbers[n];
    if (code === 0) now = { colour: "", bold: false };
    else if (code === 1) now = { ...now, bold: true };
    else if (code === 22) now = { ...now, bold: false };
    else if (code === 39) now = { ...now, colour: "" };
    else if (code >= 30 && code <= 37) now = { ...now, colour: NAMES[code - 30] };
    else if (code >= 90 && code <= 97) now = { ...now, colour: NAMES[code - 90] };
    else if (code === 38 || code === 48) {
      if (code === 38 && numbers[n + 1] === 5) now = { ...now, colour: NAMES[numbers[n + 2] % 8] && numbers[n + 2] < 16 ? NAMES[numbers[n + 2] % 8] : "" };
      n += numbers[n + 1] === 5 ? 2 : 4;
    }
  }
  return now;
}

/** Lines after each other in the colours that they were printed in. */
export class Painter {
  constructor() {
    this.look = { colour: "", bold: false };
  }

  /** The parts of a line: {text, look}, where `look` is a class or "". */
  paint(line) {
    const parts = [];
    let from = 0;
    const add = text => text && parts.push({ text, look: [this.look.colour && "ansi-" + this.look.colour, this.look.bold && "ansi-bold"].filter(Boolean).join(" ") });
    for (const found of line.matchAll(ESCAPE)) {
      add(line.slice(from, found.index));
      from = found.index + found[0].length;
      if (found[2] === "m") this.look = turned(this.look, found[1].split(";").map(Number));
    }
    add(line.slice(from));
    return parts;
  }
}
