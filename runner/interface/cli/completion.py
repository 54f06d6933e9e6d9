"""`recipe completion`: print the completion script of a shell, and list completions for the script.

The script calls `recipe __complete WORD…` with the unfinished word last. The output has one
candidate per line, followed by a tab and a description if there is one. The lines `:files` and
`:folders` ask the shell to complete paths. Errors print nothing, because they would garble the
prompt. Recipes are read as plain YAML, so that invalid recipes work too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ...errors import RecipeError
from ...paths import CallerLocation, is_path, location
from .verbs import VERBS, parser_of

_SCRIPTS: Final = {
    "bash": r"""# recipe completion for bash: eval "$(recipe completion bash)"
_recipe() {
    local line word piece head candidate
    local -a words
    COMPREPLY=()
    line=${COMP_LINE:0:COMP_POINT}
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[-1]}
    # readline breaks words at = : and @; a reply stands for the part after the last of them.
    piece=${COMP_WORDS[COMP_CWORD]}
    case $piece in =|:|@) piece= ;; esac
    head=${word%"$piece"}
    while IFS=$'\t' read -r candidate _; do
        case $candidate in
            :files) compopt -o filenames; while IFS= read -r candidate; do COMPREPLY+=("$candidate"); done < <(compgen -f -- "$piece") ;;
            :folders) compopt -o filenames; while IFS= read -r candidate; do COMPREPLY+=("$candidate"); done < <(compgen -d -- "$piece") ;;
            *) [[ $candidate == *[=/] ]] && compopt -o nospace; COMPREPLY+=("${candidate#"$head"}") ;;
        esac
    done < <("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
}
complete -F _recipe recipe
""",
    "zsh": r"""#compdef recipe
# recipe completion for zsh: eval "$(recipe completion zsh)", after compinit
_recipe() {
    local line candidate meaning
    local -a plain open
    while IFS= read -r line; do
        case $line in
            :files) compset -P '*='; _files; continue ;;
            :folders) _files -/; continue ;;
        esac
        candidate=${line%%$'\t'*}
        meaning=${line#*$'\t'}
        [[ $meaning == $line ]] && meaning=
        if [[ $candidate == *[=/] ]]; then open+=("${candidate//:/\\:}:$meaning"); else plain+=("${candidate//:/\\:}:$meaning"); fi
    done < <("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( $#plain )) && _describe -V recipe plain
    (( $#open )) && _describe -V recipe open -S ''
    return 0
}
compdef _recipe recipe
""",
    "fish": r"""# recipe completion for fish: recipe completion fish | source
function __recipe_complete
    set -l words (commandline -opc)
    set -l now (commandline -ct)
    for line in ($words[1] __complete $words[2..-1] -- "$now" 2>/dev/null)
        switch $line
            case :files
                set -l head (string match -r '^[a-z0-9_]+=' -- $now)
                for path in (__fish_complete_path (string replace -r '^[a-z0-9_]+=' '' -- $now))
                    echo "$head$path"
                end
            case :folders
                __fish_complete_directories $now
            case '*'
                echo $line
        end
    end
end
complete -c recipe -f -a '(__recipe_complete)'
""",
}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "shell",
        choices=sorted(_SCRIPTS),
        help="Shell to print a completion script for",
    )


def run(args: argparse.Namespace) -> int:
    print(_SCRIPTS[args.shell], end="")
    return 0


def answer(words: Sequence[str]) -> int:
    """Print the candidates of `recipe __complete WORD…`, and return 0 even after an error."""
    try:
        for candidate in dict.fromkeys(candidates(list(words))):
            print(candidate)
    except (RecipeError, OSError):
        return 0
    return 0


def candidates(words: list[str]) -> Iterator[str]:
    """Yield completions of the last word; `words` is the command line after `recipe`."""
    if len(words) > 1 and words[-2] == "--":  # fish puts -- before the unfinished word
        del words[-2]
    *before, word = words or [""]
    verb = next((each for each in before if each in VERBS), None)
    if verb is None:
        yield from _verbs(word)
    else:
        before.remove(verb)
        yield from _candidates_of_verb(verb, before, word)


def _candidates_of_verb(verb: str, before: list[str], word: str) -> Iterator[str]:
    """Yield completions of `word`; `before` has the words before it without the verb."""
    parser, _ = parser_of(verb)
    value_flags = _flags_with_value(parser)
    if before and before[-1] in value_flags:
        flag = before.pop()
        yield from _values(value_flags[flag], flag, word, before)
        return
    flag, equals, value = word.partition("=")
    takes_value = flag.startswith("--") and flag in value_flags
    if equals and takes_value:
        for found in _values(value_flags[flag], flag, value, before):
            # `:files` and `:folders` are requests to the shell, not values.
            if not found.startswith(":"):
                yield f"{flag}={found}"
    elif word.startswith("-"):
        yield from _flags(parser, word)
    else:
        positionals = _positional_words(before, value_flags)
        yield from _positional_candidates(verb, parser, word, positionals, _location_of(before))


def _flags_with_value(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the actions of the flags that take a value, by flag."""
    found = {}
    for action in parser._actions:
        if action.nargs != 0:
            found.update(dict.fromkeys(action.option_strings, action))
    return found


def _verbs(word: str) -> Iterator[str]:
    if word.startswith("-"):
        yield from _starting_with(word, ["--help", "--version"])
    else:
        yield from _starting_with(word, (f"{name}\t{says}" for name, (_, says) in VERBS.items()))


def _flags(parser: argparse.ArgumentParser, word: str) -> Iterator[str]:
    """Yield the flags that start with `word`; short flags only if `word` has one or two characters."""
    shows_short = word != "--" and len(word) < 3
    known = []
    for action in parser._actions:
        says = f"\t{action.help}" if action.help else ""
        for option in action.option_strings:
            if option.startswith("--") or shows_short:
                known.append(f"{option}{says}")
    yield from _starting_with(word, known)


def _values(action: argparse.Action, flag: str, word: str, before: list[str]) -> Iterator[str]:
    """Yield completions for the value of a flag."""
    place = _location_of(before)
    if action.choices is not None:
        yield from _starting_with(word, map(str, action.choices))
    elif flag in ("-C", "--out"):
        yield ":folders"
    elif flag in ("-f", "--file", "-i", "--inputs"):
        yield ":files"
    elif flag == "--preset":
        complete, comma, last = word.rpartition(",")
        for name in _starting_with(last, _names(_recipe(before, place), "presets")):
            yield f"{complete}{comma}{name}"
    elif action.metavar == "STEP":
        yield from _starting_with(word, _names(_recipe(before, place), "steps"))
    elif flag == "--driver":
        from ... import extensions

        yield from _starting_with(word, extensions.drivers(""))


def _positional_candidates(
    verb: str,
    parser: argparse.ArgumentParser,
    word: str,
    positionals: list[str],
    place: CallerLocation,
) -> Iterator[str]:
    """Yield completions for a positional argument: choices, input values, steps, inputs, recipes.

    `positionals` are the earlier ones on the command line.
    """
    actions = [action for action in parser._actions if not action.option_strings]
    choices = _find_choices(actions)
    name, equals, value = word.partition("=")
    if choices is not None:
        yield from _starting_with(word, map(str, choices))
    elif equals:
        yield from _input_values(_recipe(positionals, place), name, value)
    else:
        if any(map(_takes_step, actions)):
            yield from _starting_with(word, _names(_recipe(positionals, place), "steps"))
        if any(action.dest in ("recipe", "words") for action in actions):
            yield from _recipes_and_inputs(verb, word, positionals, place)


def _find_choices(actions: Sequence[argparse.Action]) -> Iterable[Any] | None:
    """Return the choices of the first argument that has any."""
    for action in actions:
        if action.choices is not None:
            return action.choices
    return None


def _takes_step(action: argparse.Action) -> bool:
    return "STEP" in str(action.metavar) or action.dest == "step"


def _recipes_and_inputs(
    verb: str, word: str, positionals: list[str], place: CallerLocation
) -> Iterator[str]:
    """Yield inputs after a recipe or an input value, and recipes until one is named.

    `validate` takes several recipes, and `show` takes no inputs.
    """
    if verb != "show" and positionals:
        yield from _input_names(word, positionals, place)
    has_recipe = any("=" not in each for each in positionals)
    if verb == "validate" or not has_recipe:
        yield from _recipes(word, place)


def _input_names(word: str, positionals: list[str], place: CallerLocation) -> Iterator[str]:
    """Yield `NAME=` for the recipe's inputs that have no value yet, except secrets."""
    inputs = _section(_recipe(positionals, place), "inputs")
    given = {each.partition("=")[0] for each in positionals}
    found = []
    for name, spec in inputs.items():
        if name not in given and not _is_secret(spec):
            found.append(f"{name}=\t{_describe_input(spec)}")
    yield from _starting_with(word, found)


def _recipes(word: str, place: CallerLocation) -> Iterator[str]:
    """Yield library recipes, then recipe files of the current directory."""
    from ...language import library

    entries = (f"{entry.id}\t{entry.summary}" for entry in library.entries())
    yield from _starting_with(word, entries)
    head = "./" if not word or word.startswith("./") else ""
    here = library.list_recipes(place.here)
    files = (f"{head}{entry.path.name}\t{entry.summary}" for entry in here)
    yield from _starting_with(word, files)
    if "/" in word:
        yield ":files"


def _input_values(recipe: Any, name: str, value: str) -> Iterator[str]:
    """Yield `NAME=VALUE` for a choice or boolean, and paths for inputs that take files."""
    spec = _section(recipe, "inputs").get(name)
    if not isinstance(spec, dict):
        return
    kind, choices = spec.get("type"), spec.get("choices")
    if kind == "choice" and isinstance(choices, list):
        yield from _starting_with(f"{name}={value}", (f"{name}={choice}" for choice in choices))
    elif kind == "boolean":
        yield from _starting_with(f"{name}={value}", (f"{name}=true", f"{name}=false"))
    elif kind in ("file", "dataset", "model") or spec.get("items") == "file":
        yield ":files"


# -- the recipe of the command line  ---------------------------------------------------------------


def _recipe(words: Sequence[str], place: CallerLocation) -> Any:
    """Return the unvalidated content of the first readable recipe; an empty mapping if none is."""
    from ...language import document, library

    for name in [*_possible_recipes(words), None]:
        try:
            return document.read(library.find(library.resolve(place, name), place.root)).value
        except RecipeError:
            continue
    return {}


def _possible_recipes(words: Sequence[str]) -> list[str]:
    """Return the words that may name the recipe: values of `--file`, then paths and ids, then
    names.
    """
    files = _values_after(words, "-f", "--file")
    ids, names = [], []
    for word in words:
        if "=" in word or word.startswith("-"):
            continue
        if is_path(word) or "@" in word:
            ids.append(word)
        if word.isidentifier():
            names.append(word)
    return files + ids + names


def _values_after(words: Sequence[str], *flags: str) -> list[str]:
    """Return each word that follows one of the flags."""
    return [word for before, word in pairwise(words) if before in flags]


def _section(recipe: Any, name: str) -> dict[str, Any]:
    """Return a mapping of the recipe, without keys that are no texts; empty if it is missing."""
    if not isinstance(recipe, dict):
        return {}
    found = recipe.get(name)
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str)}


def _names(recipe: Any, section: str) -> list[str]:
    return list(_section(recipe, section))


def _is_secret(spec: Any) -> bool:
    return isinstance(spec, dict) and spec.get("type") == "secret"


def _describe_input(spec: Any) -> str:
    """Return the doc text or the type of an input on one line."""
    if not isinstance(spec, dict):
        return ""
    return " ".join(str(spec.get("doc") or spec.get("type") or "").split())


def _location_of(words: Sequence[str]) -> CallerLocation:
    """Return the location of `-C`, otherwise of the current directory."""
    folders = _values_after(words, "-C")
    if not folders:
        return location(os.environ)
    return CallerLocation(Path(folders[0]).expanduser())


def _positional_words(words: list[str], value_flags: dict[str, argparse.Action]) -> list[str]:
    """Return the positional words, and the value of `--file` as a path."""
    found = []
    for before, word in pairwise(["", *words]):
        if word.startswith("-"):
            continue
        if before not in value_flags:
            found.append(word)
        elif before in ("-f", "--file"):
            path = word if "/" in word else f"./{word}"
            found.append(path)
    return found


def _starting_with(word: str, candidates: Any) -> Iterator[str]:
    for candidate in candidates:
        text = "".join(map(_printable, str(candidate)))
        if text.startswith(word):
            yield text


def _printable(char: str) -> str:
    """Return a character of a candidate; a space for a line break or control character."""
    return char if char.isprintable() or char == "\t" else " "
