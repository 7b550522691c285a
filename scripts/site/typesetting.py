"""What HTML made from Markdown lacks: where code may break, and Chinese lines without blanks."""

from __future__ import annotations

import re

_HAN = "\u3000-\u303f\u3400-\u9fff\uff00-\uffef\u201c\u201d\u2014\u2026"
_STOP = "\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f\u201d"
_OPEN, _CLOSE = r"<(?:a|code|em|strong)\b[^>]*>", r"</(?:a|code|em|strong)>"
_JOINED = re.compile(
    rf"(?<=[{_HAN}])((?:{_CLOSE})*)\n *((?:{_OPEN})*)(?=[{_HAN}])"
    rf"|(?<=[{_STOP}])((?:{_CLOSE})*)\n *((?:{_OPEN})+|(?=[^\s<]))"
)
_PLACES = re.compile(
    r"(?P<pre><pre\b.*?</pre>)"
    r"|(?P<row><tr>\s*<td\b[^>]*>)(?P<head>.*?</td>)"
    r"|<code>(?P<code>[^<]*)</code>",
    re.S,
)
LONG = 12
"""Words of code that have more letters may break."""


def typeset(html: str, language: str) -> str:
    """A page's content with the places where its code may break; Chinese lines are joined."""
    html = re.sub(_PLACES, _breakable, html)
    if language == "en":
        return html
    html = html.replace('title="Permanent link"', 'title="\u672c\u8282\u94fe\u63a5"')
    parts = re.split(r"(<pre\b.*?</pre>)", html, flags=re.S)
    return "".join(p if p.startswith("<pre") else re.sub(_JOINED, _together, p) for p in parts)


def _together(match: re.Match[str]) -> str:
    """A line's end between Chinese letters, or after a stop, which browsers show as a blank."""
    return "".join(part or "" for part in match.groups())


def _breakable(match: re.Match[str]) -> str:
    if match["pre"]:
        return match["pre"]
    if match["row"]:  # a name stays whole, a message of several words does not
        return match["row"] + re.sub(r"<code>(?=[^<]* )", '<code class="words">', match["head"])
    return f"<code>{' '.join(map(_word, match['code'].split(' ')))}</code>"


def _word(word: str) -> str:
    """An option stays whole; a long path, call or name may break behind its joints."""
    if re.match(r"--?\w", word):
        return f'<span class="whole">{word}</span>'
    return re.sub(r"(?<=\w[./_(=,:])(?=[A-Za-z])", "<wbr>", word) if len(word) > LONG else word
