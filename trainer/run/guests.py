"""Sinks for trackers that Perdure does not install: `tracking.sinks: ["trainer.run.guests:mlflow"]`
or `:trackio`. Restarts of a run continue the same run of the tracker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.node.files import read_text, write_new
from trainer.run.sinks import recipe_of


class _Mlflow:
    """A sink that logs to the MLflow server at MLFLOW_TRACKING_URI. A file in the run directory
    keeps the id of the MLflow run. A step that is computed again has both values, sorted by
    time."""

    def __init__(self, run_dir: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, self._client = Metric, MlflowClient()
        file = run_dir / "mlflow-run-id"
        if not file.exists():
            write_new(file, self._begin(recipe_of(run_dir), run_dir.name) + "\n")
        self._run = read_text(file).strip()

    def _begin(self, recipe: Mapping[str, Any], name: str) -> str:
        tracking, client = recipe["tracking"], self._client
        existing = client.get_experiment_by_name(project := tracking["project"])
        experiment = existing.experiment_id if existing else client.create_experiment(project)
        run = client.create_run(experiment, run_name=tracking["name"] or name).info.run_id
        for section, keys in recipe.items():
            for key, value in keys.items():
                if isinstance(value, bool | int | float | str):
                    client.log_param(run, f"{section}.{key}", value)
        return str(run)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        at = int(values["time"] * 1000)
        metrics = [
            self._metric(key.replace("@", "_at_"), value, at, step)
            for key, value in values.items()
            if key != "time"
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Trackio:
    """A sink that logs to trackio: to its local database, or to the Space TRACKIO_SPACE_ID."""

    def __init__(self, run_dir: Path) -> None:
        import trackio

        recipe = recipe_of(run_dir)
        tracking = recipe["tracking"]
        name = tracking["name"] or run_dir.name
        self._run = trackio.init(tracking["project"], name=name, config=recipe, resume="allow")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({key: value for key, value in values.items() if key != "time"}, step=step)

    def close(self) -> None:
        self._run.finish()


mlflow, trackio = _Mlflow, _Trackio  # the names for `tracking.sinks`
