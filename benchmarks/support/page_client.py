"""Queries a live page as a browser does: the page once, then what is new, every WAIT seconds.

Usage: python -m benchmarks.support.page_client LINK WAIT
"""

import json
import re
import sys
import time
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen


def main() -> None:
    link, wait = sys.argv[1], float(sys.argv[2])
    text = _get(link)
    cursor: Any = _cursor(text)
    while True:
        time.sleep(wait)
        query = {"run": 0, **cursor, "token": urlsplit(link).query.partition("=")[2]}
        reply = json.loads(_get(f"{link.partition('?')[0]}data?{urlencode(query)}"))
        cursor = reply.get("cursor", cursor)


def _get(link: str) -> str:
    with urlopen(link) as reply:
        return str(reply.read().decode())


def _cursor(text: str) -> dict[str, Any]:
    """The first "cursor" of the data in a page."""
    at = re.search(r'"cursor":', text)
    assert at, text[:500]
    cursor, _ = json.JSONDecoder().raw_decode(text, at.end())
    return dict(cursor)


if __name__ == "__main__":
    main()
