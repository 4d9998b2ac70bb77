"""Search for better hyperparameters: python -m training.search SPACE.yaml.

Every trial is an ordinary run with a folder of its own, OUTPUT_DIR/trial_003. Optuna chooses the
values and says which trials to prune, from the validation rows only. Whatever stops a search, the
same command resumes it.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import OneLineParser, run_command
from training.search.processes import share_machine
from training.search.space import SearchSpace, read_space
from training.search.trials import search


def main() -> int:
    keys = [f"{name}: {field.description}." for name, field in SearchSpace.model_fields.items()]
    parser = OneLineParser(
        prog="python -m training.search", description=__doc__, epilog="\n\n".join(keys)
    )
    parser.add_argument(
        "space",
        metavar="SPACE.yaml",
        type=Path,
        help="what to search; its keys are explained below",
    )
    space = read_space(parser.parse_args().space)
    return search(space, share_machine(space))


if __name__ == "__main__":
    run_command(main)
