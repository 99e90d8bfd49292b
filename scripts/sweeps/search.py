"""`train -m sweep=optuna key=interval(a,b) ...`: Optuna chooses the values of each next job."""

from callbacks.support.study import as_url, import_optuna, open_storage, storage_file, study_errors
from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import SweepConfig
from scripts.cli.arguments import Arguments
from scripts.composition.compose import split_search
from scripts.composition.identity import refuse_outside
from scripts.composition.overrides import Swept
from scripts.sweeps.check import check_built, checked
from scripts.sweeps.jobs import run_jobs
from scripts.sweeps.launchers.warm import modules_of
from scripts.sweeps.space import Space, given
from scripts.sweeps.sweep import Sweep

JOURNAL = "study.journal"  # in the sweep's folder


def search(arguments: Arguments) -> int:
    """Run the jobs of a study, and return the first failed one's exit code.

    The study is a function of the seed and of the results of the jobs. A resumed study keeps its
    jobs, and interrupted ones run first. It learns nothing from a job that fails.
    """
    space, fixed, settings = _space(arguments)
    jobs = [[*fixed, *values] for values in space.samples()]
    configs = checked(arguments, jobs)
    import_optuna()
    from scripts.sweeps.study import StudyPlan, check_distributions, enqueue, open_study
    from scripts.sweeps.trials import Trials

    config = space.composed.config
    plan = StudyPlan(settings, config["seed"], space)
    entries = space.entries(settings.enqueue, whole=settings.sampler == "grid")
    it = Sweep(arguments, config, space.names, settings.n_trials)
    _check_study(settings.storage or (str(it.found / JOURNAL) if it.found else None))
    it.server.modules = modules_of(configs)
    monitor = check_built(arguments, jobs, it.server, alone=True)
    it.metric = f"val/{monitor}" if monitor else None
    with it.held():
        place, name = as_url(settings.storage or str(it.folder / JOURNAL)), config["name"]
        study = open_study(place, name, it.ranking.name, it.ranking.rank_of(1.0) < 0, plan)
        check_distributions(study, space.dimensions)
        print(f"study {name}: optuna-dashboard {place}", flush=True)
        with study_errors(place):
            enqueue(study, entries)
            trials = Trials(it, space, study, fixed, place)
        it.write()
        it.settings.jobs = it.settings.jobs or 1  # on a cluster, too: the study learns from each
        run_jobs(it, trials.ask, trials.tell)
        return it.close()


def _check_study(place: str | None) -> None:
    """Open a study that is there already, so that a damaged one ends the search without a trace."""
    file = None if place is None else storage_file(as_url(place))
    if place is not None and file is not None and file.exists():
        open_storage(place, must_exist=True)


def _space(arguments: Arguments) -> tuple[Space, list[Swept], SweepConfig]:
    """Return the space, the overrides of all jobs, and the settings of the search."""
    texts, varied = split_search(arguments)
    space = Space(arguments, texts, varied)
    settings = parse(space.composed.config).sweep or SweepConfig()
    if space.composed.config["dry_run"]:
        hint = "leave -m and sweep=optuna out for the plan of one job"
        raise ConfigError(Problem("dry_run", "a search has no plan of its jobs", hint))
    if more := given(arguments, settings.params, {d.name for d in varied}):
        space = Space(arguments, texts, [*varied, *more])
    if not space.dimensions:
        message = "nothing to search: give a key as interval(a,b) or choice(a,b)"
        raise ConfigError(Problem("sweep.params", message))
    refuse_outside(space.names)
    return space, [_fixed(text) for text in texts], settings


def _fixed(text: str) -> Swept:
    key, _, value = text.partition("=")
    return Swept(text, key.lstrip("+~"), value, False)
