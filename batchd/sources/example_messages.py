"""TensorFlow's messages for samples, made without TensorFlow. Daemon and workers.

    message BytesList       { repeated bytes value = 1; }
    message FloatList       { repeated float value = 1; }
    message Int64List       { repeated int64 value = 1; }
    message Feature         { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message Features        { map<string, Feature> feature = 1; }
    message FeatureList     { repeated Feature feature = 1; }
    message FeatureLists    { map<string, FeatureList> feature_list = 1; }
    message Example         { Features features = 1; }
    message SequenceExample { Features context = 1; FeatureLists feature_lists = 2; }

They have a pool of their own, so a process that has TensorFlow too has them twice, and neither minds.

Invariant: names and numbers are TensorFlow's. An ``Example`` can be read as a ``SequenceExample``: its features are the context.
"""

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "tensorflow"


def _messages() -> FileDescriptorProto:
    file = FileDescriptorProto(name="batchd/example.proto", package=_PACKAGE, syntax="proto3")
    for name, kind in (
        ("BytesList", FieldDescriptorProto.TYPE_BYTES),
        ("FloatList", FieldDescriptorProto.TYPE_FLOAT),
        ("Int64List", FieldDescriptorProto.TYPE_INT64),
    ):
        values = file.message_type.add(name=name)
        values.field.add(name="value", number=1, type=kind, label=FieldDescriptorProto.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), start=1):
        _add(feature, name.replace("List", "_list").lower(), number, name).oneof_index = 0
    _add_map(file.message_type.add(name="Features"), "feature", "Feature")
    _add(file.message_type.add(name="FeatureList"), "feature", 1, "Feature", repeated=True)
    _add_map(file.message_type.add(name="FeatureLists"), "feature_list", "FeatureList")
    _add(file.message_type.add(name="Example"), "features", 1, "Features")
    sequence = file.message_type.add(name="SequenceExample")
    _add(sequence, "context", 1, "Features")
    _add(sequence, "feature_lists", 2, "FeatureLists")
    return file


def _add(message: DescriptorProto, name: str, number: int, of: str, *, repeated: bool = False) -> FieldDescriptorProto:
    """A field that is another message."""
    return message.field.add(
        name=name,
        number=number,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.{of}",
        label=FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL,
    )


def _add_map(message: DescriptorProto, name: str, of: str) -> None:
    """The field 1, a map from strings to another message, which in a descriptor is a list of entries."""
    entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    entry.field.add(
        name="key", number=1, type=FieldDescriptorProto.TYPE_STRING, label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    _add(entry, "value", 2, of)
    _add(message, name, 1, f"{message.name}.{entry.name}", repeated=True)


_POOL = DescriptorPool()
_POOL.Add(_messages())
Example: Any = GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.Example"))
"""``tf.train.Example``."""
SequenceExample: Any = GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.SequenceExample"))
"""``tf.train.SequenceExample``."""
