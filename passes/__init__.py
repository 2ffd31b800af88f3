"""Passes over a captured step: analyses that write facts, transforms that write nodes.

Imported as `elixir_fx.passes`; the folder stands at the top of the repository because the
passes are what a reader looks for first.
"""

if __name__ == "passes":
    raise ImportError("import these passes as elixir_fx.passes, not as a top-level package")
