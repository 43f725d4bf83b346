"""Chakra's messages as protobuf's own library knows them: an independent reader of what we write.

Field numbers and types are those of the schema that MLCommons publishes (0.0.4), as far as a
recording can fill them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TYPES = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "message": 11,
}
_OPTIONAL, _REPEATED = 1, 3

_MESSAGES = {
    "AttributeProto": [
        ("name", 1, "string"),
        ("int32_val", 7, "int32"),
        ("int64_val", 9, "int64"),
        ("bool_val", 27, "bool"),
        ("string_val", 29, "string"),
    ],
    "GlobalMetadata": [("version", 1, "string"), ("attr", 2, "*AttributeProto")],
    "Node": [
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "int32"),  # an enum is a number on the wire
        ("ctrl_deps", 4, "*uint64"),
        ("data_deps", 5, "*uint64"),
        ("start_time_micros", 6, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("attr", 10, "*AttributeProto"),
    ],
}


def read_chakra(data: bytes) -> tuple[Any, list[Any]]:
    """The metadata and the nodes of a trace; fails on a field that the schema does not have."""
    kinds = _load_kinds()
    messages = list(_split(data))
    metadata = _parse(kinds["GlobalMetadata"], messages[0])
    return metadata, [_parse(kinds["Node"], one) for one in messages[1:]]


def attributes(message: Any) -> dict[str, int | bool | str]:
    """A message's attributes by name."""
    found = {one.name: getattr(one, one.WhichOneof("value")) for one in message.attr}
    assert len(found) == len(message.attr)
    return found


def _parse(kind: Any, data: bytes) -> Any:
    message = kind()
    assert message.ParseFromString(data) == len(data)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    assert message.ByteSize() == size, "a field that the schema does not have"
    return message


def _split(data: bytes) -> Any:
    while data:
        size = shift = used = 0
        while True:
            byte = data[used]
            size |= (byte & 0x7F) << shift
            used, shift = used + 1, shift + 7
            if byte < 0x80:
                break
        assert len(data) >= used + size
        yield data[used : used + size]
        data = data[used + size :]


def _load_kinds() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="chakra_test.proto", package="chakra_test", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            _add_field(message, field, number, kind)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra_test.{name}"))
        for name in _MESSAGES
    }


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    label = _REPEATED if kind.startswith("*") else _OPTIONAL
    plain = kind.lstrip("*")
    field = message.field.add(name=name, number=number, label=label)
    field.type = _TYPES.get(plain, _TYPES["message"])
    if plain not in _TYPES:
        field.type_name = f".chakra_test.{plain}"
    if name.endswith("_val"):
        field.oneof_index = 0
