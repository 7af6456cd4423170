"""The Hydra launcher that trains the jobs of any sweeper together.

Hydra's own launchers start one job after the other, so what they train never meets. Hydra takes
plugins of this namespace package only, and imports them in every program: what costs time is
imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction

    from tunebook.config import RecipeConfig
    from tunebook.errors import TunebookError


class SweepLauncher(Launcher):
    """Composes every job, then hands all of them to the sweep of the command line."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from omegaconf import open_dict, read_write

        from tunebook.compose import HydraTask
        from tunebook.errors import ConfigError

        if not isinstance(task_function, HydraTask) or task_function.sweep is None:
            raise ConfigError("hydra/launcher=tunebook: it launches the recipes of tunebook only")
        self._task = task_function
        self._sweep = task_function.sweep
        self._loader = hydra_context.config_loader
        self._config = config
        # Sweepers leave results of their own there.
        with read_write(config.hydra.sweep), open_dict(config.hydra.sweep):
            config.hydra.sweep.dir = str(self._sweep.begin(config))

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from hydra.core.utils import JobReturn, JobStatus, setup_globals

        from tunebook.errors import TunebookError
        from tunebook.sweeps.trial import raise_all

        setup_globals()
        # What a sweeper proposes in several batches cannot be counted before.
        whole = self._config.hydra.sweeper.get("max_batch_size", 0) is None
        jobs = [list(each) for each in self._sweep.overrides(job_overrides)]
        configs: list[RecipeConfig] = []
        problems: dict[str, TunebookError] = {}
        for number, overrides in enumerate(jobs, initial_job_idx):
            try:
                configs.append(self._composed(overrides, number))
            except TunebookError as error:
                problems[f"trial {number}"] = error
        raise_all(problems)
        values = self._sweep.train(
            list(zip(jobs, configs, strict=True)), first=initial_job_idx, whole=whole
        )
        # A trial that failed has no value; the sweep says why, and tells it by the exit code.
        return [
            JobReturn(overrides=each, _return_value=value, status=JobStatus.COMPLETED)
            for each, value in zip(jobs, values, strict=True)
        ]

    def _composed(self, overrides: list[str], number: int) -> RecipeConfig:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import open_dict, read_write

        config = self._loader.load_sweep_config(self._config, overrides)
        with read_write(config.hydra.job), open_dict(config.hydra.job):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        hydra: Any = HydraConfig.instance()
        before = hydra.cfg
        hydra.set_config(config)
        try:
            own = config.copy()
            with read_write(own), open_dict(own):
                del own["hydra"]
            return self._task.parsed(own)
        finally:
            hydra.cfg = before
