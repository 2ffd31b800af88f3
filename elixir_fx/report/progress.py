"""Say what takes long: a line on the terminal once a compilation has run for a second."""

import threading
from types import TracebackType

from rich.console import Console
from rich.status import Status

DELAY_S = 1.0


class Progress:
    """Call it with what is going on; shown on a terminal if the `with` lasts a second."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._message = ""
        self._status: Status | None = None
        self._timer: threading.Timer | None = None

    def __call__(self, message: str) -> None:
        self._message = message
        if self._status is not None:
            self._status.update(f"elixir_fx: {message}")

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._timer = threading.Timer(DELAY_S, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self) -> None:
        self._status = self._console.status(f"elixir_fx: {self._message}")
        self._status.start()
