"""JSON schemas of many kinds, for answers and for arguments of tools."""

from __future__ import annotations

from typing import Any

__all__ = ["SCHEMAS"]

STRING = {"type": "string", "maxLength": 20}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"type": "object", "properties": {"name": STRING, "age": {"type": "integer"}}, "required": ["name", "age"]},
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": {"c": STRING}}}}},
        "required": ["a"],
    },
    "enum": {"type": "object", "properties": {"unit": {"enum": ["°C", "°F", 3, None]}}, "required": ["unit"]},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "optional": {"type": "object", "properties": {"a": STRING, "b": {"type": ["integer", "null"]}}},
    "unicode": {
        "type": "object",
        "properties": {"größe": STRING, "名前": {"const": "日本"}},
        "required": ["größe", "名前"],
    },
    "references": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "n": {"$ref": "#/$defs/node"}},
                "required": ["v"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "any of": {
        "anyOf": [{"type": "integer"}, {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}]
    },
    "pattern": {
        "type": "object",
        "properties": {"date": {"type": "string", "pattern": r"^\d{4}-\d{2}$"}},
        "required": ["date"],
    },
    "bounds": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 12}},
        "required": ["n"],
    },
}
