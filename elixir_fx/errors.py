"""What can go wrong, in the user's words: what failed, the numbers, what to do.

Every error that this package raises on purpose is an `ElixirError`; the subclasses say
which of the five verbs of `compile()` could not be done.
"""


class ElixirError(Exception):
    """Base of every error that elixir_fx raises on purpose."""


class CaptureError(ElixirError):
    """The model's training step could not be captured as one graph."""


class PlanError(ElixirError):
    """No plan meets the budgets, or a plan does not belong to this model."""


class LayoutError(PlanError):
    """A call does not fit the layout that was made for an earlier one."""


class VerifyError(ElixirError):
    """A transformed graph breaks one of the laws; the graph is never run."""


class TierError(ElixirError):
    """A tier of memory (device, host, disk) could not hold, read or write what it must."""


class RankError(ElixirError):
    """Ranks that train one model together disagree, or one of them failed or went away."""
