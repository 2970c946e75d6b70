"""Pictures lead to themselves: a tap shows their small print at full size."""

from __future__ import annotations

import re
from typing import Any

_PICTURE = re.compile(r'<p>(<img [^>]*?src="([^"]+)"[^>]*>)</p>')


def on_page_content(content: str, **_: Any) -> str:
    """Link each picture that stands in a paragraph of its own.

    >>> on_page_content('<p><img alt="Steps" src="steps.png" /></p>')
    '<p><a href="steps.png"><img alt="Steps" src="steps.png" /></a></p>'
    """
    return _PICTURE.sub(r'<p><a href="\2">\1</a></p>', content)
