"""How near the search comes to the best plan: small random problems, solved by exhaustion.

    python examples/benchmarks/oracle.py [--problems 200] [--first 0] [--all]

Prints the problems whose plan is not the best one (with --all every one), the share that is
(within 1e-9), and the worst ratio.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # its oracle, not this file

from oracle import TOLERANCE, compare

from elixir_fx.units import times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--all", action="store_true", help="print equal ones as well")
    options = parser.parse_args()
    ratios = []
    played = 0
    for found in compare(range(options.first, options.first + options.problems)):
        equal = found.ratio <= 1 + TOLERANCE
        ratios.append(found.ratio)
        played += found.played
        if options.all or not equal:
            print(
                f"{found.title:45} best {times(found.best_s):>10}  "
                f"search {times(found.search_s):>10}  {found.ratio - 1:8.2%}",
                flush=True,
            )
    same = sum(ratio <= 1 + TOLERANCE for ratio in ratios)
    near = sum(ratio <= 1.02 for ratio in ratios)
    print(
        f"{len(ratios)} problems, {played} steps played: equal {same / len(ratios):.1%}, "
        f"within 2 % {near / len(ratios):.1%}, worst ratio {max(ratios):.4f}, "
        f"beyond the best {sum(ratio < 1 - TOLERANCE for ratio in ratios)}"
    )


if __name__ == "__main__":
    main()
