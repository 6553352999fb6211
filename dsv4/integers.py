"""Integer division that rounds up."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple that is not below ``a``."""
    return ceil_div(a, multiple) * multiple
