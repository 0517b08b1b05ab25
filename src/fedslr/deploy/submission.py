"""Ask a SuperLink to run a federation, through Flower's own programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fedslr.core.errors import FedslrError
from fedslr.run import recipe_text

MAX_OUTPUT_LENGTH = 400
"""Characters that are shown of the output of a program that failed."""
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Settings with which Flower's programs contact nobody else."""

APP = """[project]
name = "fedslr-federation"
version = "1.0.0"
description = "The two apps of fedslr"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedslr"

[tool.flwr.app.components]
serverapp = "fedslr.deploy.flower:server"
clientapp = "fedslr.deploy.flower:client"

[tool.flwr.app.config]
recipe = ""
out = ""
"""


def program(name: str) -> str:
    """Return the path of one of Flower's programs, preferably of this environment."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FedslrError(f"{name} is not installed; pip install 'fedslr[deploy]'")
    return found


def environment(home: Path, **changes: str) -> dict[str, str]:
    """Return the environment of Flower's programs: no telemetry, no installing of packages, a folder of their own."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        **NO_TELEMETRY,
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        **changes,
    }


def write_app(folder: Path) -> Path:
    """Write the app that SuperLinks and SuperNodes are asked to run; it only names the two apps in fedslr."""
    app = folder / "app"
    app.mkdir(parents=True, exist_ok=True)
    (app / "pyproject.toml").write_text(APP, "utf-8")
    return app


def submit(folder: Path, connection: str, recipe: str, out: Path, env: Mapping[str, str]) -> str:
    """Ask a SuperLink to run a federation; return the number that it gave the run."""
    app = write_app(folder)
    settings = folder / "run.toml"
    asked = {"recipe": recipe, "out": str(out)}
    settings.write_text("".join(f"{k} = {recipe_text.toml_value(v)}\n" for k, v in asked.items()), "utf-8")
    advice = f"; check that the SuperLink runs, and the connection '{connection}' in config.toml of FLWR_HOME"
    told = call([program("flwr"), "run", str(app), connection, "--run-config", str(settings)], env, advice)
    found = re.search(r"started run (\d+)", told)
    return found[1] if found else "RUN_ID"


def call(command: list[str], env: Mapping[str, str], advice: str = "") -> str:
    """Return the output of a program; if it fails, raise an error with its output as one line, and advice."""
    done = subprocess.run(command, env=dict(env), capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        said = " ".join(re.sub(r"[─-╿]|\[Errno \d+\]", " ", f"{done.stdout} {done.stderr}").split()).rstrip(".")
        if len(said) > MAX_OUTPUT_LENGTH:
            said = "… " + said[-MAX_OUTPUT_LENGTH:].partition(" ")[2]
        raise FedslrError(f"{Path(command[0]).name} {command[1]} failed: {said}{advice}")
    return done.stdout
