"""The command line: `elixir-fx machine` and `elixir-fx plan`.

    elixir-fx machine --disk /nvme                this machine, measured
    elixir-fx machine h100-sxm                    one of the catalogue, with its sources
    elixir-fx plan train.py:build --machine h100-sxm --ranks 16 --memory 60GiB --explain

What was asked for goes to standard output. Exit codes: 0 done; 1 refused, such as a budget that no
plan meets, with one line on standard error; 2 a command that makes no sense.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elixir_fx import catalogue
from elixir_fx.api import plan
from elixir_fx.config import read_options
from elixir_fx.errors import ElixirError
from elixir_fx.report.machines import catalogue_text, machine_text, sources_text
from elixir_fx.report.text import plan_text
from elixir_fx.runtime.measure import this_machine

REFUSED = 1
SENSELESS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process; its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], str] = arguments.run
        print(run(arguments), end="")
    except SystemExit as end:  # argparse's, after --help and after what it cannot read
        return end.code if isinstance(end.code, int) else SENSELESS
    except ElixirError as error:
        print(f"elixir-fx: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elixir-fx", description="Plan training before it runs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    machine = commands.add_parser("machine", help="measure this machine, or show another")
    machine.add_argument("name", nargs="?", metavar="NAME", help="of the catalogue, or a file")
    machine.add_argument("--list", action="store_true", help="list the catalogue")
    machine.add_argument("--disk", type=Path, metavar="FOLDER", help="measure this disk as well")
    machine.add_argument("--threads", type=int, help="compute threads to measure with")
    machine.add_argument("--save", type=Path, metavar="FILE", help="write it as JSON")
    machine.add_argument("--json", action="store_true", help="print it as JSON")
    machine.set_defaults(run=_machine, parser=machine)

    planned = commands.add_parser("plan", help="plan the training of a model without running it")
    planned.add_argument(
        "what",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns (model, example_inputs)",
    )
    planned.add_argument("--machine", metavar="NAME|FILE", help="to plan for; this one by default")
    planned.add_argument("--ranks", type=int, default=1, metavar="N")
    for tier, flag in (
        ("device", "--memory"),
        ("host", "--host-memory"),
        ("disk", "--disk-memory"),
    ):
        planned.add_argument(flag, metavar="SIZE", help=f'budget of the {tier}, such as "8GiB"')
    planned.add_argument("--optimizer", default="adamw", metavar="NAME")
    planned.add_argument(
        "--device",
        default="meta",
        help="that the function builds on; on meta, the default, the model takes no memory",
    )
    planned.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    planned.add_argument("--json", action="store_true", help="print it as JSON")
    planned.add_argument(
        "--explain",
        action="store_true",
        help="print what the device's memory buys, and what more or less would change",
    )
    planned.set_defaults(run=_plan, parser=planned)
    return parser


def _machine(arguments: argparse.Namespace) -> str:
    if arguments.list:
        return catalogue_text(map(catalogue.sheet, catalogue.names()))
    if arguments.threads is not None and arguments.threads < 1:
        arguments.parser.error(f"--threads {arguments.threads}: give 1 or more")
    sources = ""
    if arguments.name is None:
        found = this_machine(
            torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            arguments.disk,
            threads=arguments.threads or torch.get_num_threads(),
        )
    else:
        given = read_options({"machine": arguments.name}).machine
        assert given is not None
        found = given
        if arguments.name in catalogue.names():
            sources = "\n" + sources_text(catalogue.sheet(arguments.name))
    if arguments.save is not None:
        found.save(arguments.save)
    return f"{found.to_json()}\n" if arguments.json else machine_text(found) + sources


def _plan(arguments: argparse.Namespace) -> str:
    build = _function(arguments.what, arguments.parser)
    with torch.device(arguments.device):
        built = build()
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        arguments.parser.error(f"{arguments.what} returns no (model, example_inputs)")
    model, example_inputs = built
    made = plan(
        model,
        _real(example_inputs),
        optimizer=arguments.optimizer,
        ranks=arguments.ranks,
        machine=arguments.machine,
        memory=arguments.memory,
        host_memory=arguments.host_memory,
        disk_memory=arguments.disk_memory,
    )
    reasons = f"\n{made.explain()}" if arguments.explain else ""  # what is saved has them, too
    if arguments.save is not None:
        made.save(arguments.save)
    return f"{made.to_json()}\n" if arguments.json else plan_text(made) + reasons


def _real(value: Any) -> Any:
    """Inputs that a step can be captured with: zeros for tensors without values."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_real, value))
    if isinstance(value, dict):
        return {name: _real(entry) for name, entry in value.items()}
    if isinstance(value, Tensor) and value.is_meta:
        return torch.zeros_like(value, device="cpu")
    return value


def _function(what: str, parser: argparse.ArgumentParser) -> Callable[[], Any]:
    """The function that FILE.py:FUNCTION names; the file's folder is where it imports from."""
    file, _, name = what.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        parser.error(f"{what!r} names no file: give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        parser.error(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module  # as an import would: dataclasses look their module up
    spec.loader.exec_module(module)
    found: object = vars(module).get(name)
    if not callable(found):
        parser.error(f"{file} has no function {name!r}")
    return found
