"""Generates the recipe reference from the docstrings of sections."""

from collections.abc import Iterator
from typing import Any

import yaml

from trainer.recipe import definition_of, recipe_schema


def recipe_reference() -> str:
    """Return the recipe reference as a Markdown page."""
    schema = recipe_schema()
    lines = [
        "# Recipe reference",
        "",
        "Made from the code by `make docs`. Every key can be overridden on the command line as",
        "`section.key=value`. `${NAME}` and `${NAME:-default}` expand environment variables.",
    ]
    for name, section in schema["properties"].items():
        definition = definition_of(section, schema)
        lines += ["", f"## `{name}`", "", definition.get("description", ""), ""]
        lines += list(_reference_rows(definition, schema, prefix=f"{name}."))
    return "\n".join(lines) + "\n"


def _reference_rows(
    definition: dict[str, Any], schema: dict[str, Any], prefix: str
) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    nested: list[tuple[str, dict[str, Any]]] = []
    required = definition.get("required", [])
    for key, value in definition["properties"].items():
        # Schemas omit defaults made by a factory, which are all {} in these tables.
        absent: Any = {} if value.get("type") == "object" else None
        default = f"`{yaml_scalar(value.get('default', absent))}`"
        default = "required" if key in required else default
        meaning = " ".join(value.get("description", "").split())
        yield f"| `{prefix}{key}` | {_type_name(value, schema)} | {default} | {meaning} |"
        inner = definition_of(value, schema)
        if "properties" in inner:
            nested.append((f"{prefix}{key}." + ("N." if _is_list(value) else ""), inner))
    for inner_prefix, inner in nested:
        yield ""
        yield inner.get("description", "")
        yield ""
        yield from _reference_rows(inner, schema, inner_prefix)


def yaml_scalar(value: Any) -> str:
    """Format a value on one line, as in a recipe."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _is_list(value: dict[str, Any]) -> bool:
    return value.get("type") == "array"


def _type_name(value: dict[str, Any], schema: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{yaml_scalar(item)}`" for item in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "anyOf" in value:
        options = [option for option in value["anyOf"] if option.get("type") != "null"]
        return " or ".join(_type_name(option, schema) for option in options)
    if "$ref" in value:
        return "section"
    if _is_list(value):
        return "list"
    return {"object": "mapping", "string": "text"}.get(value.get("type", ""), value.get("type", ""))
