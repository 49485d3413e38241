"""How a length of time is written for people. Commands that show what a daemon does; standard library only."""


def duration(seconds: float) -> str:
    """One or two units: 0.4 s, 12 s, 3 min 20 s, 5 h 2 min."""
    if seconds < 10:  # noqa: PLR2004  below it tenths tell something
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
