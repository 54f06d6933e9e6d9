// Words to find texts by, the same in every field: `word`, `-word`, `"two words"`, `/regex/`.

const TOKEN = /-?(?:\/(?:\\.|[^/\\])+\/|[^\s"]*"[^"]*"|[^\s]+)/g;

/** The words of a text that was typed. */
export function wordsOf(text) {
  return text.match(TOKEN) || [];
}

/** Whether a text has a word, in small letters, or fits a /regex/; as a function.  Raises SyntaxError for a bad /regex/. */
export function finder(word) {
  if (word.length > 2 && word.startsWith("/") && word.endsWith("/")) {
    const expression = new RegExp(word.slice(1, -1), "i");
    return text => expression.test(text);
  }
  const wanted = word.replaceAll('"', "").toLowerCase();
  return text => text.toLowerCase().includes(wanted);
}

/** Whether a text has everything that was typed, as a function; a bad /regex/ finds nothing. */
export function matcher(typed) {
  const not = find => text => !find(text);
  try {
    const all = wordsOf(typed).map(word => (word.startsWith("-") && word.length > 1 ? not(finder(word.slice(1))) : finder(word)));
    return text => all.every(find => find(text));
  } catch {
    return () => false;
  }
}
