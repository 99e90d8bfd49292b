"""A curve as a few lines of block characters."""

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def plot(
    values: Sequence[float], length: int | None = None, width: int = 64, height: int = 5
) -> list[str]:
    """Draw `values` as an area from zero to their maximum, over `length` updates.

    They lie at even distances; without a length there is one for each update.
    """
    length = len(values) if length is None else length
    top = max(values)
    if top <= 0:
        return [f"0 over {length:,} updates"]
    columns = _sample(values, width)
    # Eighths of a line; what is above zero shows.
    filled = [max(round(v / top * height * 8), v > 0) for v in columns]
    axis = f"{top:.3g}"
    lines = []
    for line in reversed(range(height)):
        blocks = "".join(_BLOCKS[min(max(f - 8 * line, 0), 8)] for f in filled)
        lines.append(f"{axis if line == height - 1 else '':>9} │{blocks}".rstrip())
    lines.append(f"{'0':>9} └{'─' * len(columns)}")
    end = f"{length:,} updates"
    lines.append(f"{'':>11}0{end:>{max(len(columns) - 1, len(end) + 1)}}")
    return lines


def _sample(values: Sequence[float], width: int) -> list[float]:
    """Return `width` values at even distances, the first and the last among them."""
    if len(values) <= width:
        repeat = max(1, width // len(values))
        return [value for value in values for _ in range(repeat)]
    last = len(values) - 1
    return [values[round(column * last / (width - 1))] for column in range(width)]
