"""What pyproject.toml cannot say: the long description is README.md without relative links, which
lead nowhere outside of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def description(readme: str, repository: str | None) -> str:
    """README.md with absolute links. As long as [project.urls] has no `Repository`, links to files
    become their text, and pictures are left out."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if "://" in target:
            return link[0]
        if not repository:
            return "" if picture else text
        path = f"/{'raw' if picture else 'blob'}/main/{target}".replace("/blob/main/#", "#")
        return f"{picture}[{text}]({repository.rstrip('/')}{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=description(
            (HERE / "README.md").read_text(encoding="utf-8"),
            project.get("urls", {}).get("Repository"),
        ),
        long_description_content_type="text/markdown",
    )
