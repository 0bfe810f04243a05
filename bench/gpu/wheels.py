"""Gathers wheels for a machine without network: what the package needs there, for its Python and its glibc.

    python -m bench.gpu.wheels --python 3.12 --out wheels

Wheels are of this project's requirements for planning, training and serving, at the versions of constraints.txt; torch,
Transformers and other large packages are left to the machine, where CUDA builds of them lie. `--also` names more.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("data", "serve")
THERE = {
    *("torch", "transformers", "accelerate", "numpy", "numba", "llvmlite", "safetensors", "tokenizers"),
    *("pyyaml", "pyarrow"),
}
"""What a machine with a CUDA build of torch and Transformers has; another build of it would hide that one. PyArrow is
45 MB and read for one file of lengths, which are drawn without it."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def requirements(project: Path) -> list[str]:
    """Of the package and of the extras, without what the machine has."""
    read = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    found = [*read["dependencies"]]
    for extra in EXTRAS:
        found += read["optional-dependencies"][extra]
    return sorted(x for x in set(found) if name_of(x) not in THERE and name_of(x) != "trimtab")


def name_of(requirement: str) -> str:
    """Of "Pillow>=11; python_version > '3'" it is "pillow".

    >>> name_of("typer >=0.12")
    'typer'
    """
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--out", type=Path, default=Path("wheels"))
    parser.add_argument("--also", nargs="*", default=[], help="more requirements")
    given = parser.parse_args()
    asked = [*requirements(ROOT / "pyproject.toml"), *given.also]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", given.python]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "-c", str(ROOT / "constraints.txt"), "-d", folder]
        done = subprocess.run([*command, *target, *asked], check=False)
        if done.returncode:
            return done.returncode
        for wheel in sorted(Path(folder).iterdir()):
            if name_of(wheel.name.split("-")[0]) not in THERE - {name_of(x) for x in given.also}:
                wheel.replace(given.out / wheel.name)
    size = sum(wheel.stat().st_size for wheel in given.out.iterdir())
    print(f"{len(list(given.out.iterdir()))} wheels, {size / 2**20:.1f} MiB in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
