"""Sizes and times as people write and read them.

Standard library only: errors, planner, passes and report all speak of bytes. `parse_size`
reads what a user gives ("8GiB"), `sizes` and `times` write what a user reads ("28.3 MiB").
"""

import re

from elixir_fx.errors import PlanError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes of a size given as a number of bytes or as text such as "8GiB", "1.5 GB", "512".

    Powers of ten (KB, MB, GB, TB) and of two (KiB, MiB, GiB, TiB), in any case. PlanError
    on anything else, negative sizes included.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = match["unit"].upper() if match else ""
        if match is None or unit not in _UNITS:
            raise PlanError(
                f"{size!r} is not a size: give bytes, or a number with B, KB, MB, GB, TB, "
                f"KiB, MiB, GiB or TiB, such as '8GiB'"
            )
        number = match["number"]
        # Whole numbers stay exact however large; only fractions go through a float.
        return int(number) * _UNITS[unit] if number.isdigit() else int(float(number) * _UNITS[unit])
    if isinstance(size, bool) or not isinstance(size, int):
        raise PlanError(f"{size!r} is not a size: give bytes as an int, or text such as '8GiB'")
    if size < 0:
        raise PlanError(f"a size cannot be negative: {size}")
    return size


def sizes(nbytes: float) -> str:
    """Bytes for people: GiB from 1000 MiB, MiB from 0.1 MiB, else KiB or bytes ("28.3 MiB")."""
    magnitude = abs(nbytes)
    if magnitude >= 1000 * MIB:
        return f"{nbytes / GIB:.1f} GiB"
    if magnitude >= 0.1 * MIB:
        return f"{nbytes / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{nbytes / KIB:.1f} KiB"
    return f"{nbytes:.0f} B"


def round_up(nbytes: int) -> str:
    """Bytes as a user would write them: not less, and hardly more."""
    if nbytes > 16 * GIB:
        return f"{-(-nbytes * 10 // GIB) / 10:g}GiB"
    if nbytes > 10 * MIB:
        return f"{-(-nbytes // MIB)}MiB"
    return f"{-(-nbytes // KIB)}KiB"


def times(seconds: float) -> str:
    """Seconds for people, in ms; above 10 s in s, below 0.1 ms in us ("12.3 ms")."""
    magnitude = abs(seconds)
    if magnitude >= 10:
        return f"{seconds:.1f} s"
    if magnitude >= 1e-4 or magnitude == 0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


def rates(bytes_per_s: float) -> str:
    """A rate for people ("2.1 GiB/s")."""
    return f"{sizes(bytes_per_s)}/s"
