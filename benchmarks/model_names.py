"""Compares every preset's parameters with the published count, and writes the libraries' names anew.

    python benchmarks/model_names.py [PART_OF_A_NAME ...]     build presets on meta, exit 1 where one is off
    python benchmarks/model_names.py --write-names            catalog/library_names.toml, of what is installed

Published counts have three digits or so, and some leave a head or a pooler out: 1.5 % apart passes.
`shared` of a preset is what the library keeps once and the authors twice.
"""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretrain import library_names
from foretrain.model_names import model_presets

TOLERANCE = 0.015


def parameters(name: str) -> int:
    """Those of the module that a preset's job builds."""
    from foretrain.api import make_job
    from foretrain.capture.sources.models import load_model

    job = make_job(name, batch=1)
    module = load_model(job.workload, 1).module
    return sum(parameter.numel() for parameter in module.parameters())


def compare(wanted: list[str]) -> int:
    """Print each preset's count beside the published one; how many are off."""
    wrong = 0
    for name, preset in model_presets().items():
        if wanted and not any(part.lower() in name.lower() for part in wanted):
            continue
        try:
            off: Any = (parameters(name) + preset.get("shared", 0)) / preset["parameters"] - 1
        except Exception as error:  # a preset that does not build is a result, too
            wrong += 1
            print(f"FAILED  {name}: {error}", flush=True)
            continue
        wrong += abs(off) > TOLERANCE
        print(f"{'OFF' if abs(off) > TOLERANCE else 'ok':7s} {name:50s} {off:+.2%}", flush=True)
    return wrong


def write_names() -> None:
    """The file that is shipped for where a library is not installed."""
    blocks = [
        "# Names of models that libraries have, for where one is not installed.\n"
        "# benchmarks/model_names.py writes them."
    ]
    for library in library_names.LIBRARIES:
        names = textwrap.fill(
            " ".join(sorted(library_names.installed_names(library))), 118, break_on_hyphens=False
        )
        blocks.append(
            f'[{library}]\nversion = "{version(library).partition("+")[0]}"\nnames = """\n{names}\n"""'
        )
    path = Path(library_names.__file__).parent / "catalog" / "library_names.toml"
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    print(f"{path}: written")


def main() -> None:
    if sys.argv[1:] == ["--write-names"]:
        write_names()
    else:
        sys.exit(compare(sys.argv[1:]) > 0)


if __name__ == "__main__":
    main()
