"""`minisgl models`: which architectures run, and what can be fetched by name."""

from __future__ import annotations

import argparse
import json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `models` to the command line."""
    parser = commands.add_parser("models", help="list the supported models", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="as JSON, for scripts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the list on stdout."""
    from minisgl_backend.models.locate import FETCHABLE, fetched_folder
    from minisgl_backend.models.registry import FAMILIES

    families = sorted(FAMILIES.values(), key=lambda family: family.architecture)
    if arguments.json:
        rows = [{"architecture": family.architecture, "models": family.models} for family in families]
        print(json.dumps({"architectures": rows, "fetchable": sorted(FETCHABLE)}, indent=2))
        return 0
    width = max(len(family.architecture) for family in families)
    for family in families:
        print(f"{family.architecture:<{width}}  {family.models}")
    print()
    for name in sorted(FETCHABLE):
        state = "fetched" if fetched_folder(name).is_dir() else f"`minisgl fetch {name}` gets it"
        print(f"{name:<{width}}  {state}")
    print("\n`minisgl inspect PATH` tells whether a folder or a GGUF file runs here, and what it needs.")
    return 0
