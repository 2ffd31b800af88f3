"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir()), "something was left on the disk"
    return done.stdout


def test_quickstart_prints_losses_and_the_graph(tmp_path: Path) -> None:
    text = run("quickstart.py", folder=tmp_path)
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "torch.ops.elixir.gather" in text


def test_graph_breaks_trains_in_several_regions(tmp_path: Path) -> None:
    text = run("graph_breaks.py", folder=tmp_path)
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "final after 3 regions" in text
    assert float(re.search(r"disk_read_bytes ([\d.]+) MiB", text).group(1)) > 0


# State: 26 MiB.
SMALL = ["--layers=2", "--width=256", "--seq=32", "--batch=2", "--steps=3", "--kernels=eager"]


def test_train_gpt_from_meta_under_a_budget(tmp_path: Path) -> None:
    text = run("train_gpt.py", *SMALL, "--meta", "--memory=20MiB", folder=tmp_path)
    first, last = re.search(r"loss: ([\d.]+) -> ([\d.]+)", text).groups()
    assert float(last) < float(first)
    measured, forecast = re.search(r"([\d.]+) MiB measured, ([\d.]+) MiB forecast", text).groups()
    assert float(measured) <= 20
    assert float(forecast) <= 20


def test_train_gpt_learns_as_plain_pytorch_does(tmp_path: Path) -> None:
    def losses(*arguments: str) -> list[str]:
        text = run("train_gpt.py", *SMALL, "--micro-batches=2", *arguments, folder=tmp_path)
        return re.findall(r"step +\d+  loss ([\d.]+)", text)

    assert losses("--memory=20MiB") == losses("--plain")
