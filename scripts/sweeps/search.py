"""`train -m sweep=optuna key=interval(a,b) ...`: Optuna chooses the values of each next job."""

from callbacks.support.study import import_optuna, study_errors
from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import SweepConfig
from scripts.cli.arguments import Arguments
from scripts.composition.compose import split_search
from scripts.composition.identity import refuse_outside
from scripts.composition.overrides import Swept
from scripts.sweeps.check import check_built, checked
from scripts.sweeps.space import Space, given
from scripts.sweeps.sweep import Sweep

JOURNAL = "study.journal"  # in the sweep's folder


def search(arguments: Arguments) -> int:
    """Run the jobs of a study, and return the first failed one's exit code.

    The study is a function of the seed and of what the jobs return. Gone on with, it remembers its
    jobs, and those that were interrupted come first. A job that fails teaches it nothing.
    """
    fixed, varied = split_search(arguments)
    settings = SweepConfig()
    space = Space(arguments, fixed, varied)
    settings = parse(space.composed.config).sweep or settings
    if more := given(arguments, settings.params, {d.name for d in varied}):
        space = Space(arguments, fixed, [*varied, *more])
    if not space.dimensions:
        message = "nothing to search: give a key as interval(a,b) or choice(a,b)"
        raise ConfigError(Problem("sweep.params", message))
    refuse_outside(space.names)
    base = [_fixed(text) for text in fixed]
    jobs = [[*base, *values] for values in space.samples()]
    checked(arguments, jobs)
    import_optuna()
    from scripts.sweeps import study
    from scripts.sweeps.trials import Trials

    config = space.composed.config
    sampler = study.keyed_sampler(settings, config["seed"], space)
    study.pruner_of(settings)
    entries = space.entries(settings.enqueue, whole=settings.sampler == "grid")
    it = Sweep(arguments, config, space.names, settings.n_trials)
    monitor = check_built(arguments, jobs, alone=True)
    it.metric = f"val/{monitor}" if monitor else None
    with it.held():
        place = settings.storage or str(it.folder / JOURNAL)
        name, larger = config["name"], it.ranking.rank_of(1.0) < 0
        opened = study.open_study(place, name, it.ranking.name, larger, sampler, settings)
        study.check_space(opened, space.dimensions)
        print(f"study {name}: optuna-dashboard {place}", flush=True)
        with study_errors(place):
            study.enqueue(opened, entries)
            found = Trials(it, space, opened, base, place)
            found.recall()
        it.write()
        while not it.ended and (asked := found.ask()) is not None:
            it.run(*asked)
            found.tell(asked[0])
        return it.close()


def _fixed(text: str) -> Swept:
    key, _, value = text.partition("=")
    return Swept(text, key.lstrip("+~"), value, False)
