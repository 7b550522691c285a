"""The command ``halfstep lab``: the experiments of the course."""

from __future__ import annotations

import json
from pathlib import Path

from halfstep.cli.commands import Lab
from halfstep.errors import ConfigError
from halfstep.files import write_whole
from halfstep.lab.course import EXPERIMENTS, experiment
from halfstep.lab.experiment import Made, Say, make, read_settings
from halfstep.lab.figure import draw
from halfstep.lab.notebook import notebook
from halfstep.words import LANGUAGES, spoken


def run(arguments: Lab) -> int:
    """List the experiments, or make one, or all, and say what follows from the numbers."""
    language = spoken()
    given = read_settings(arguments.settings)
    if not arguments.experiment:
        print("\n".join(f"{name:<14} {Say(name, language)('question')}" for name in EXPERIMENTS))
        return 0
    if arguments.experiment == "all" and given:
        raise ConfigError("halfstep lab all takes no settings; give them to one experiment")
    chosen = (
        EXPERIMENTS.values()
        if arguments.experiment == "all"
        else [experiment(arguments.experiment)]
    )
    for each in chosen:
        say = Say(each.name, language)
        each.options_of(given)  # refuses before the question
        print(f"{say('question')}\n", flush=True)
        made, folder = make(each, given), Path(arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        _write(made, folder, language)
        if arguments.notebook:
            _write_notebook(made, folder, language)
    return 0


def _write_notebook(made: Made, folder: Path, language: str) -> None:
    path = folder / f"{made.experiment.name}.ipynb"
    text = json.dumps(notebook(made, language), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")
    print(f"\n{Say(made.experiment.name, language)('notebook', path=path)}")


def _write(made: Made, folder: Path, language: str) -> None:
    """Write the numbers, and the figure in every language; print what follows, and what is next."""
    say = Say(made.experiment.name, language)
    name = made.experiment.name
    text = json.dumps(made.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / f"{name}.json", text + "\n")
    figures = {
        each: folder / f"{name}{'' if each == 'en' else '.' + each}.svg" for each in LANGUAGES
    }
    drawn = all([draw(made, path, each) for each, path in figures.items()])
    print(made.verdict(language))
    print(say("look") if drawn else say("no_figure"))
    if drawn:
        print(say("written", path=figures[language]))
    print(f"\n{say('changes')}:")
    for option, default, shows in made.experiment.changeable(language):
        print("  " + say("change", option=option, default=default, shows=shows))
