"""Holds what `perdure launch skypilot` writes against SkyPilot's own schema, and has it refuse a
misspelt key in every place. Rents no machine.

    python -m tests.opt_in.manifests PERDURE      in an environment with skypilot (make manifests)
"""

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.misspelt import misspelt

RECIPES = Path(__file__).parents[2] / "recipes"
SKY = ["skypilot", "llama3_8b.yaml", "--package", "perdure.whl"]
WRITTEN = {
    "bucket": [*SKY, "--gpus", "8xH100", "--bucket", "s3://mine"],
    "bucket-nodes": [*SKY, "--gpus", "8xH100", "--bucket", "s3://mine", "--nodes", "2:2"],
    "bucket-google": [*SKY, "--gpus", "8xH100", "--bucket", "gs://mine"],
    "volume": [*SKY, "--gpus", "4xA100", "--nodes", "1:4", "--volume", "shared", "--interface",
               "eth1"],
}  # fmt: skip
"""File → arguments of `perdure launch`."""


def main(perdure: str) -> None:
    """Write, check, and spoil all files."""
    program = Path(perdure).absolute()
    os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama3_8b.yaml", "schema.json"):
            Path(folder, name).write_bytes((RECIPES / name).read_bytes())
        Path(folder, "perdure.whl").touch()
        os.chdir(folder)
        for name, arguments in WRITTEN.items():
            command = [program, "launch", *arguments, "--out", f"{name}.yaml"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            task = yaml.safe_load(Path(f"{name}.yaml").read_text())
            if problem := check(task):
                sys.exit(f"{name}: {problem}")
            planted = list(misspelt(task))
            passed = [where for where, bad in planted if not check(bad)]
            if passed:
                sys.exit(f"{name}: misspelt keys are not refused: {', '.join(passed)}")
            print(f"{name}: valid; {len(planted)} misspelt keys refused")


def check(document: dict[str, Any]) -> str:
    """What is wrong with a task of SkyPilot; empty if nothing is."""
    import sky
    from sky.utils import schemas

    # Of this mapping SkyPilot takes any key; its schema names those that it reads.
    _, recovery = schemas.get_resources_schema()["properties"]["job_recovery"]["anyOf"]
    given = document.get("resources", {}).get("job_recovery", {})
    if unknown := given.keys() - recovery["properties"]:
        return f"job_recovery has no {', '.join(unknown)}"
    values = [(name, "x") for name in document.get("secrets", {})]  # of --secret
    try:
        sky.Task.from_yaml_config(copy.deepcopy(document), secrets_overrides=values)
    except Exception as error:  # whatever it raises, it does not take the task
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
