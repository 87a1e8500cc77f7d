"""Texts that come from elsewhere, made safe to print. It needs no torch, as `metamd --help` does not."""

from metamd.files.limits import SENTENCE_LIMIT


def install(extra: str) -> str:
    """How an extra is installed: from the repository, as long as there is no release.

    Example:
        >>> install("plot")
        "In a clone of the repository, run: pip install '.[plot]'"
    """
    return f"In a clone of the repository, run: pip install '.[{extra}]'"


def one_line(text: str) -> str:
    """An untrusted text that is safe to print: control characters, escapes and text-direction marks are spelled out.

    Example:
        >>> print(one_line("a\\nb\\x1b[31m"))
        a\\nb\\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def brief(text: str, limit: int = SENTENCE_LIMIT) -> str:
    """A sentence that may quote untrusted text, cut to a readable length."""
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def shown(value: object) -> str:
    """An untrusted value for a sentence: its repr, which escapes control characters, cut to a readable length."""
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
