"""Thirty JSON Schemas of the kinds that people send: nested, arrays, enums, unicode, recursive. All are bounded enough
for a model of random weights to come to their end."""

from typing import Any

Schema = dict[str, Any]


def text(most: int = 12, **more: object) -> Schema:
    """A short string."""
    return {"type": "string", "maxLength": most, **more}


def obj(required: list[str] | None = None, /, **properties: object) -> Schema:
    """An object of these properties and no others."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: object, most: int = 3, **more: object) -> Schema:
    """A short array."""
    return {"type": "array", "items": items, "maxItems": most, **more}


def digit(low: int = 0, high: int = 9) -> Schema:
    """A small whole number."""
    return {"type": "integer", "minimum": low, "maximum": high}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


NULL = {"type": "null"}
BOOL = {"type": "boolean"}
LIST_NODE = obj(value=digit(), next={"anyOf": [NULL, _ref("node")]})
TREE = obj(name=text(4), children={"type": "array", "items": _ref("tree"), "maxItems": 1})
EXPRESSION = {"anyOf": [digit(), obj(op={"enum": ["+", "-"]}, left=digit(), right=_ref("expression"))]}

SCHEMAS: dict[str, Schema] = {
    "boolean": BOOL,
    "null": NULL,
    "integer": digit(-50, 1000),
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 8},
    "string": text(20),
    "empty-string": text(0),
    "lengths": text(9, minLength=7),
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1, 2]}]},
    "const": {"const": {"fixed": ["ü", 1]}},
    "unicode-enum": {"enum": ["日本語", "straße", "😀🎉", 'né"e\\']},
    "unicode-keys": obj(**{"größe": digit(), "名前": text(3), 'k"ey/~': BOOL}),
    "array": array(digit(), 5, minItems=2),
    "tuple": {"type": "array", "prefixItems": [BOOL, digit(), text(3)], "items": False, "minItems": 3},
    "nested-arrays": array(array(array(BOOL, 2), 2), 2),
    "empty-object": obj(),
    "person": obj(name=text(10), age=digit(0, 120), email={"anyOf": [NULL, text(8)]}),
    "optional": obj(["b"], a=digit(), b=BOOL, c=text(4)),
    "deep": obj(a=obj(b=obj(c=obj(d=obj(e=array(obj(f=BOOL), 2)))))),
    "named-values": {
        "type": "object",
        "properties": {"id": digit()},
        "required": ["id"],
        "patternProperties": {"^x_[a-c]$": BOOL},
        "additionalProperties": False,
    },
    "any-of": {"anyOf": [obj(kind={"const": "a"}, x=digit()), obj(kind={"const": "b"}, y=BOOL), array(digit(), 2)]},
    "all-of": {"allOf": [digit(0, 80), {"type": "integer", "minimum": 30}]},
    "shared": {**obj(home=_ref("point"), work=_ref("point")), "$defs": {"point": obj(x=digit(), y=digit())}},
    "linked-list": {**LIST_NODE, "$defs": {"node": LIST_NODE}},
    "tree": {**_ref("tree"), "$defs": {"tree": TREE}},
    "expression": {**_ref("expression"), "$defs": {"expression": EXPRESSION}},
    "order": obj(
        id={"type": "string", "pattern": "^[A-Z]{3}[0-9]{4}$"},
        lines=array(obj(sku=text(6), quantity=digit(1, 99), gift=BOOL), 2, minItems=1),
        state={"enum": ["new", "paid", "sent"]},
        note={"anyOf": [text(10), NULL]},
    ),
}
