"""The verbs around recipe files: list, show, validate, schema.  Starts nothing; knows no workspace but as the folder where paths begin."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ...errors import Invalid, NotFound, Problem
from ...language import library
from .parser import color, told_apart

if TYPE_CHECKING:
    from ...language.recipe import Input, Preset, Recipe, Resources, Step


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb in ("list", "show"):
        parser.add_argument("--json", action="store_true", help="machine-readable")
    if verb == "show":
        parser.add_argument("recipe", help="NAME@VERSION of the library, or a path such as ./pipeline.yaml")
    elif verb == "validate":
        parser.add_argument(
            "words", nargs="*", metavar="FILE|NAME|INPUT=VALUE", help="recipes (default: recipe.yaml here), `-` for standard input, and inputs to try"
        )
        parser.add_argument(
            "--format", default="text", choices=["text", "json", "github", "sarif"], help="how problems are printed: for people, programs, CI"
        )
    elif verb == "schema":
        parser.add_argument("--markdown", action="store_true", help="the language reference instead, as Markdown")


def run(args: argparse.Namespace) -> int:
    verbs = {"list": _list, "show": _show, "validate": _validate, "schema": _schema}
    return verbs[args.verb](args)


# -- list ------------------------------------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    known = [(entry.id, entry.summary, entry) for entry in library.entries()]
    here = [(f"./{entry.path.name}", entry.summary, entry) for entry in library.beside(args.workspace)]
    wrong = library.faults()
    if args.json:
        rows = [(e.id, n, s, e.origin or "library") for n, s, e in known] + [(e.id, n, s, "folder") for n, s, e in here]
        print(json.dumps([{"recipe": id, "name": name, "summary": summary, "from": origin} for id, name, summary, origin in rows], indent=2))
    else:
        width = max((len(name) for name, *_ in [*known, *here]), default=0)
        groups = {"in this folder": here}
        for row in known:
            groups.setdefault(f"from {row[2].origin}" if row[2].origin else "library", []).append(row)
        for title, members in groups.items():
            if members:
                print("\n".join([f"{title}:", *(f"  {_safe(name):{width}}  {_safe(summary)}".rstrip() for name, summary, _ in members), ""]))
        if not args.quiet:
            print(
                "`recipe show NAME` tells more; `recipe new NAME` begins one of your own."
                if known or here
                else "no recipes; `recipe new NAME` begins one"
            )
    if wrong:
        raise Invalid(wrong)
    return 0


def _safe(text: str) -> str:
    """Text from a file, harmless to a terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)


# -- show ------------------------------------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    from ...language import parse

    recipe = parse.load(library.find(args.recipe, args.workspace))
    if args.json:
        print(json.dumps(_described(recipe), indent=2))
        return 0
    lines = [f"{recipe.id}: {recipe.summary}" if recipe.summary else recipe.id]
    if recipe.doc:
        lines += ["", *recipe.doc.rstrip().splitlines()]
    if recipe.inputs:
        rows = [(spec.name, _kind(spec), _default(spec), _about(spec)) for spec in recipe.inputs.values()]
        widths = [min(24, max(len(row[n]) for row in rows)) for n in range(3)]
        lines += [
            "",
            "inputs:",
            *("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows),
        ]
    if recipe.presets:
        lines += ["", "presets:", *(f"  {preset.name}: {_preset(preset)}".rstrip(": ") for preset in recipe.presets.values())]
    lines += ["", "steps:"]
    for step in recipe.steps.values():
        lines += _step_lines(recipe, step)
    lines += ["", "outputs:" if recipe.outputs is not None else "outputs: those of every step"]
    lines += [f"  {name}: {leaf}" for name, leaf in (recipe.outputs or {}).items()]
    wants = [f"{name} {value}" for name, value in _resources(recipe.resources).items()]
    limits = _limits(recipe)
    lines += ["", "needs: " + ", ".join(wants)] if wants else []
    lines += ["limits: " + ", ".join(f"{name} {value}" for name, value in limits.items())] if limits else []
    print("\n".join(_safe(line) for line in lines))
    return 0


def _kind(spec: Input) -> str:
    return f"list of {spec.items}" if spec.type == "list" and spec.items else spec.type


def _default(spec: Input) -> str:
    if spec.type == "secret":
        return f"${spec.env}" if spec.required else f"${spec.env}, optional"
    if spec.has_default:
        text = spec.default if isinstance(spec.default, str) else json.dumps(spec.default)
        return f"= {text}" if text else '= ""'
    return "required" if spec.required else "optional"


def _about(spec: Input) -> str:
    """The author's words, then what bounds the value and what it means to change it."""
    notes = [f"{word} {json.dumps(value) if not isinstance(value, str) else value}" for word, value in spec.limits.items() if word != "choices"]
    choices = spec.limits.get("choices")
    if isinstance(choices, list):
        notes.insert(0, " | ".join(str(choice) for choice in choices))
    notes += ["raising it continues" if spec.continues else "", "" if spec.key else "never a reason to run again", "streamed" if spec.stream else ""]
    shown = "; ".join(note for note in notes if note)
    return f"{spec.doc} ({shown})" if spec.doc and shown else spec.doc or shown


def _preset(preset: Preset) -> str:
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in preset.inputs.items()]
    words += [f"{name}: {value}" for name, value in (_resources(preset.resources) if preset.resources else {}).items()]
    return " ".join(words)


def _step_lines(recipe: Recipe, step: Step) -> list[str]:
    """One step: what it is, what it needs, and what it makes below it."""
    needs = _needs(recipe, step)
    what = f"uses {step.uses.recipe}" if step.uses else f"the best of {step.select.step} by {step.select.metric}" if step.select else ""
    what = what or ("accelerate " + str((step.accelerate or {}).get("script") or (step.accelerate or {}).get("module")) if step.accelerate else "")
    head = f"  {step.id}" + (f"  ({what})" if what else "") + (f"  <- {', '.join(needs)}" if needs else "")
    if step.matrix:
        head += f"  for each {', '.join(step.matrix)}"
    if step.when is not None:
        head += f"  when {step.when}"
    lines = [head]
    made = [(f"{output.name}: {output.path}" + ("/" if output.directory else "")) for output in step.outputs]
    made += [f"{state.name}: {state.path}/ (state)" for state in step.state]
    return lines + [f"  {'└' if n == len(made) - 1 else '├'}─ {text}" for n, text in enumerate(made)]


def _needs(recipe: Recipe, step: Step) -> list[str]:
    """Ids of the steps that this one names, and of the makers of files that it lists."""
    from ...language.inputs import leaves
    from ...language.template import TemplateError, references

    written: Any = recipe.document.value
    for part in step.origin:
        written = written[part]
    makers = {output.path.rstrip("/"): other.id for other in recipe.steps.values() for output in other.outputs}
    found = [*step.needs, *([step.select.step] if step.select else []), *(makers[dep] for dep in step.deps if dep in makers)]
    for leaf, _ in leaves(written):
        try:
            found += [reference.path[1] for reference in references(leaf) if reference.path[0] == "steps" and len(reference.path) > 1]
        except TemplateError:
            continue  # `recipe validate` tells what is wrong with it
    return [id for id in dict.fromkeys(found) if id in recipe.steps]


def _resources(resources: Resources) -> dict[str, Any]:
    from ...language.units import size_text

    named: dict[str, Any] = {"gpus": resources.gpus, "gpu": resources.gpu, "cpus": resources.cpus}
    named |= {name: size_text(value) for name in ("gpu_memory", "memory", "disk") if (value := getattr(resources, name)) is not None}
    return {name: value for name, value in {**named, **resources.pools}.items() if value is not None}


def _limits(recipe: Recipe) -> dict[str, str]:
    from ...language.units import duration_text, money_text

    found = {"time": duration_text(recipe.limits.time)} if recipe.limits.time is not None else {}
    return {**found, "cost": money_text(recipe.limits.cost)} if recipe.limits.cost is not None else found


def _described(recipe: Recipe) -> dict[str, Any]:
    inputs = {
        spec.name: {
            "type": spec.type,
            "items": spec.items,
            "doc": spec.doc,
            "required": spec.required and not spec.has_default,
            "default": spec.default,
            "limits": dict(spec.limits),
            "env": spec.env,
            "key": spec.key,
            "continues": spec.continues,
        }
        for spec in recipe.inputs.values()
    }
    steps = {
        step.id: {
            "needs": _needs(recipe, step),
            "uses": step.uses.recipe if step.uses else None,
            "outputs": {output.name: output.path + ("/" if output.directory else "") for output in step.outputs},
            "state": {state.name: state.path for state in step.state},
            "matrix": list(step.matrix or ()),
            "resources": _resources(step.resources.over(recipe.resources)),
        }
        for step in recipe.steps.values()
    }
    return {
        "recipe": recipe.id,
        "summary": recipe.summary,
        "doc": recipe.doc,
        "path": recipe.document.name,
        "inputs": inputs,
        "presets": {preset.name: dict(preset.inputs) for preset in recipe.presets.values()},
        "steps": steps,
        "outputs": dict(recipe.outputs) if recipe.outputs is not None else None,
        "resources": _resources(recipe.resources),
        "limits": _limits(recipe),
    }


# -- validate --------------------------------------------------------------------------------------------------------------------------------------


def _validate(args: argparse.Namespace) -> int:
    from ...execution import validation
    from ...language.document import MAX_BYTES
    from ..diagnostics import render

    names, given = told_apart(args.words)
    names = names or ["./recipe.yaml"]
    found: list[Problem] = []
    for name in dict.fromkeys(names):
        mine: list[Problem]
        try:
            if name == "-":
                mine = validation.read(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>", args.workspace, given)
            else:
                mine = validation.file(library.find(name, args.workspace), args.workspace, given)
        except NotFound as error:
            mine = [Problem("not-found", str(error), fix=error.fix)]
        found += mine
        if args.format == "text" and not args.quiet and not any(problem.severity == "error" for problem in mine):
            print(f"{name}: valid", file=sys.stderr)
    if args.quiet:
        found = [problem for problem in found if problem.severity == "error"]
    sys.stdout.write(render(found, args.format, color(sys.stdout)))
    return Invalid.exit_code if any(problem.severity == "error" for problem in found) else 0


# -- schema ----------------------------------------------------------------------------------------------------------------------------------------


def _schema(args: argparse.Namespace) -> int:
    text = library.schema_text()
    if args.markdown:
        from ...language.reference import markdown

        text = markdown(json.loads(text))
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    return 0
