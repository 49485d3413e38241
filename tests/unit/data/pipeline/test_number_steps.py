"""Steps on labels and numbers, against plain Python.

The references are whole numbers, fractions and numpy's float64.
"""

from fractions import Fraction
from io import BytesIO
from math import isfinite, isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Cast, Clip, MapIds, OneHot, Scale
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import jpeg, photo
from support.steps import check_steps

WHOLE = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64")
EVERY_TYPE = ("bool", *WHOLE, *FLOATS)


def make(step, value, dtype="int64", shape=()):
    """Return the output of a pipeline of one step for a field "label" of this type."""
    columns = [Column("label", dtype=dtype, shape=shape)]
    (field,) = sample_fields(columns, [step], "fail")[:-1]
    row = {"label": np.full(field.shape, 77, field.dtype)}
    Pipeline(columns, [step], 0).run({"label": value}, 0, 0, 0, row)
    return row["label"]


def arrays(dtypes=EVERY_TYPE, **options):
    """Draw arrays of up to two dimensions of any of these types."""
    return st.sampled_from(dtypes).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=2, max_side=3), **options)
    )


@pytest.mark.parametrize("dtype", EVERY_TYPE)
def test_one_hot_has_a_one_in_the_place_of_the_class(dtype):
    """The result is a row of the identity matrix for every type."""
    for label in range(4):
        made = make(OneHot(classes=4, dtype=dtype), label)
        assert made.dtype == dtype
        assert np.array_equal(made, np.eye(4)[label])


def test_one_hot_of_many_labels_has_one_more_dimension():
    """Shape s becomes s + [classes]."""
    labels = np.array([[0, 2], [1, 0], [2, 2]], np.uint8)

    assert np.array_equal(make(OneHot(classes=3), labels, "uint8", (3, 2)), np.eye(3)[labels])


@pytest.mark.parametrize(("label", "dtype"), [(4, "int64"), (-1, "int64"), (200, "uint8"), (2**64 - 1, "uint64")])
def test_a_label_outside_the_classes_is_a_bad_sample(label, dtype):
    """The error names the number and the valid range."""
    with pytest.raises(SampleUndecodable, match=rf"^{label} is not a class from 0 to 3 "):
        make(OneHot(classes=4), np.dtype(dtype).type(label), dtype)


def test_a_bad_number_among_many_is_named_with_its_place():
    """The error names the first bad number."""
    with pytest.raises(SampleUndecodable, match=r"^9 at \[1, 0\] is not a class"):
        make(OneHot(classes=4), np.array([[0, 1], [9, 8]]), "int64", (2, 2))


def cast_alone(number, from_dtype, dtype, *, truncate):
    """Return one number after "cast", computed in exact arithmetic.

    Return None where the sample is bad.
    """
    is_number = isfinite(number)
    exact = Fraction(number) if is_number else None
    if dtype == "bool" or dtype in WHOLE:
        low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not is_number or (exact.denominator != 1 and not truncate):
            return None
        whole = abs(exact.numerator) // exact.denominator * (-1 if exact < 0 else 1)
        return whole if low <= whole <= high else None
    with np.errstate(over="ignore"):
        rounded = float(np.array(number, from_dtype).astype(dtype))
    if is_number and not isfinite(rounded):
        return None
    if from_dtype in WHOLE and not truncate and Fraction(rounded) != exact:
        return None
    return rounded


@given(arrays(), st.sampled_from(EVERY_TYPE), st.booleans())
def test_cast_gives_the_same_numbers_or_none(numbers, dtype, truncate):
    """All pairs of types are tried, with limits of integers, NaN and infinities."""
    wanted = [cast_alone(number, numbers.dtype.name, dtype, truncate=truncate) for number in numbers.ravel().tolist()]
    step = Cast(dtype=dtype, truncate=truncate)

    if None in wanted:
        with pytest.raises(SampleUndecodable):
            make(step, numbers, numbers.dtype.name, numbers.shape)
    else:
        made = make(step, numbers, numbers.dtype.name, numbers.shape)
        assert made.dtype == dtype
        assert all(
            one == other or (isnan(one) and isnan(other))
            for one, other in zip(made.ravel().tolist(), wanted, strict=True)
        )


@pytest.mark.parametrize(
    ("number", "dtype", "to", "reason"),
    [
        (300, "int64", "uint8", "300 is not from 0 to 255, as uint8 is"),
        (-1, "int64", "uint64", "-1 is not from 0"),
        (2, "uint8", "bool", "2 is not from 0 to 1, as bool is"),
        (float("nan"), "float32", "int64", "nan is not a number of int64"),
        (float("-inf"), "float64", "int8", "-inf is not a number of int8"),
        (2.5, "float64", "int64", "2.5 has a fractional part, which int64 has not; truncate = true cuts it off"),
        (2.0**63, "float64", "int64", "is not from -9223372036854775808 to 9223372036854775807"),
        (2.0**64, "float32", "uint64", "is not from 0 to 18446744073709551615"),
        (1e300, "float64", "float32", "1e[+]300 is too large for float32"),
        (70_000, "int64", "float16", "70000 is too large for float16"),
        (2**24 + 1, "int64", "float32", "16777217 is a whole number that float32 cannot hold exactly"),
        (2**64 - 1, "uint64", "float64", "18446744073709551615 is a whole number that float64 cannot hold exactly"),
    ],
)
def test_a_number_that_a_type_cannot_hold_is_a_bad_sample(number, dtype, to, reason):
    """No number wraps around, and none loses precision silently."""
    with pytest.raises(SampleUndecodable, match=reason):
        make(Cast(dtype=to), np.dtype(dtype).type(number), dtype)


@pytest.mark.parametrize(
    ("number", "dtype", "to", "becomes"),
    [
        (-2.9, "float64", "int8", -2),
        (255.9, "float32", "uint8", 255),
        (-0.5, "float32", "uint8", 0),
        (2**24 + 1, "int64", "float32", 2**24),
        (2**24 + 3, "int64", "float32", 2**24 + 4),
    ],
)
def test_truncation_is_towards_zero_where_it_is_allowed(number, dtype, to, becomes):
    """Whole numbers may be rounded, to the even neighbour at a tie."""
    assert make(Cast(dtype=to, truncate=True), np.dtype(dtype).type(number), dtype) == becomes


@given(
    arrays((*WHOLE, *FLOATS)),
    st.one_of(st.none(), st.integers(-300, 300)),
    st.one_of(st.none(), st.integers(-300, 300)),
)
def test_clip_gives_the_nearest_number_between_the_bounds(numbers, low, high):
    """Bounds outside the type's range have no effect, and NaN stays."""
    dtype = numbers.dtype.name
    columns = [Column("label", dtype=dtype)]
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        return
    step = Clip(min=low, max=high)
    if check_steps(columns, [step]):
        assert dtype in WHOLE
        assert (low or 0) > np.iinfo(dtype).max or (high or 0) < np.iinfo(dtype).min
        return

    made = make(step, numbers, dtype, numbers.shape)

    def clipped(number):
        if low is not None and number < low:
            return low
        return high if high is not None and number > high else number

    wanted = np.array([clipped(number) for number in numbers.ravel().tolist()], dtype)
    assert np.array_equal(made.ravel(), wanted, equal_nan=dtype in FLOATS)


def test_bounds_of_floating_point_are_rounded_to_its_type():
    """The result is the number of the type that is nearest to the bound."""
    assert make(Clip(max=0.1), np.float16(0.5), "float16") == np.float16(0.1)
    assert make(Clip(min=-1e6), np.float16("-inf"), "float16") == float("-inf")


@given(
    arrays(elements={"allow_nan": True}) | arrays(WHOLE),
    st.floats(-1e300, 1e300),
    st.floats(-1e300, 1e300),
    st.sampled_from(FLOATS),
)
def test_scale_is_float64_rounded_once(numbers, factor, offset, dtype):
    """Each number equals Python's result; a number that becomes infinite is bad."""
    wanted = []
    for number in numbers.ravel().tolist():
        with np.errstate(over="ignore"):
            rounded = float(np.array(float(number) * factor + offset).astype(dtype))
        wanted.append(None if isfinite(number) and not isfinite(rounded) else rounded)
    step = Scale(factor=factor, offset=offset, dtype=dtype)

    if None in wanted:
        with pytest.raises(SampleUndecodable, match=f'becomes too large for {dtype} by "scale"'):
            make(step, numbers, numbers.dtype.name, numbers.shape)
    else:
        made = make(step, numbers, numbers.dtype.name, numbers.shape)
        assert np.array_equal(made.ravel(), np.array(wanted, dtype), equal_nan=True)


def test_numbers_of_an_image_can_be_scaled_as_well():
    """The step runs after the steps on the pixels."""
    steps = [Decode(), Resize(size=(4, 6)), Scale(field="image", factor=1 / 255, offset=-0.5)]
    row = {"image": np.zeros((4, 6, 3), np.float32)}
    pixels = {"image": np.zeros((4, 6, 3), np.uint8)}
    data = jpeg(photo(4, 6))

    Pipeline([Column("image", "encoded")], steps, 0).run({"image": memoryview(data)}, 0, 0, 0, row)
    Pipeline([Column("image", "encoded")], steps[:2], 0).run({"image": memoryview(data)}, 0, 0, 0, pixels)

    assert np.array_equal(row["image"], (pixels["image"] * (1 / 255) - 0.5).astype(np.float32))


def test_steps_on_numbers_follow_each_other():
    """Each step takes the result of the step before."""
    steps = [Cast(dtype="int32", truncate=True), Clip(min=0, max=2), OneHot(classes=3, dtype="bool")]
    columns = [Column("label", dtype="float32", shape=(3,))]
    row = {"label": np.zeros((3, 3), np.bool_)}

    Pipeline(columns, steps, 0).run({"label": np.array([-7.5, 1.9, 12], np.float32)}, 0, 0, 0, row)

    assert np.array_equal(row["label"], np.eye(3, dtype=bool))


@pytest.mark.parametrize("value", ["four", np.zeros(3, np.int64), 1.5])
def test_a_value_that_is_not_what_its_column_says_is_a_bad_sample(value):
    """The check runs before any step changes the value."""
    with pytest.raises(SampleUndecodable, match=r"'label' is .* instead of int64"):
        make(OneHot(classes=4), value)


@pytest.mark.parametrize(
    ("column", "step", "problem"),
    [
        (
            Column("label", dtype="float32"),
            OneHot(classes=2),
            "\"one_hot\" needs whole numbers, and 'label' is float32",
        ),
        (Column("label", dtype="bool"), OneHot(classes=2), "needs whole numbers"),
        (Column("label", dtype="int8", shape=(1,) * 8), OneHot(classes=2), "which is too large"),
        (Column("label", dtype="int8", shape=(1 << 20,)), OneHot(classes=1 << 20), "which is too large"),
        (Column("label", "text"), Cast(dtype="int8"), "\"cast\" needs numbers, and 'label' is text"),
        (Column("label", "encoded"), Scale(), '"decode" it first'),
        (Column("other"), Scale(), "is done to 'label', and a sample has 'other'"),
        (Column("label", dtype="bool"), Clip(min=0), "\"clip\" needs numbers, and 'label' is bool"),
        (Column("label", dtype="int8"), Clip(min=0.5), "min = 0.5, and 'label' is int8: whole numbers"),
        (Column("label", dtype="uint8"), Clip(max=-1), "max = -1, and 'label' is uint8: 0 to 255"),
        (Column("label", dtype="uint8"), Clip(min=256), "min = 256, and 'label' is uint8: 0 to 255"),
        (Column("label", dtype="float16"), Clip(min=1e5), "min = 100000.0, and 'label' is float16"),
    ],
)
def test_steps_that_cannot_be_done_are_named(column, step, problem):
    """The error names the field and its type, and says what would help."""
    assert [text for text in check_steps([column], [step]) if problem in text]


CITYSCAPES = {"7": 0, "8": 1, "11": 2, "33": 18}
ADE20K = np.r_[255, np.arange(150)]


@given(arrays(WHOLE, elements=st.integers(0, 60)), st.sampled_from([None, 100]))
def test_map_ids_gives_the_number_of_each_id(ids, ignore):
    """Of any shape and type; what is not in the table is ignored, or a bad sample."""
    step = MapIds(table=CITYSCAPES, ignore=ignore)
    unknown = {int(one) for one in ids.reshape(-1)} - {7, 8, 11, 33}
    if unknown and ignore is None:
        with pytest.raises(SampleUndecodable, match='is not in the table of "map_ids"; ignore is for the others'):
            make(step, ids, ids.dtype.name, ids.shape)
        return

    made = make(step, ids, ids.dtype.name, ids.shape)

    assert made.dtype == ids.dtype
    assert np.array_equal(made, np.vectorize(lambda one: CITYSCAPES.get(str(one), ignore), otypes=[ids.dtype])(ids))


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_map_ids_reads_a_file(tmp_path, dtype):
    """ADE20K: 0 becomes 255, and each class one less; negative ids are in no file."""
    np.save(tmp_path / "ids.npy", ADE20K)
    ids = np.array([[0, 1, 150], [2, 151, 255]], dtype)

    made = make(MapIds(file=tmp_path / "ids.npy", ignore=254), ids, dtype, ids.shape)

    assert made.tolist() == [[255, 0, 149], [1, 254, 254]]
    if dtype == "int32":
        assert make(MapIds(file=tmp_path / "ids.npy", ignore=-1), np.int32(-2), dtype) == -1


def test_map_ids_is_exact_for_the_largest_ids():
    """Those of 24 bits, as in panoptic masks."""
    made = make(
        MapIds(table={"16777215": 70_000, "70000": 2**31 - 1}), np.array([70_000, (1 << 24) - 1]), "int32", (2,)
    )

    assert made.tolist() == [2**31 - 1, 70_000]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs either table"),
        ({"table": {"7": 0}, "file": "ids.npy"}, "needs either table"),
        ({"table": {"-1": 0}}, "has '-1', which is no id"),
        ({"table": {"16777216": 0}}, "has '16777216', which is no id"),
    ],
)
def test_map_ids_has_one_table_of_ids(options, problem):
    """What cannot be an id is refused before any sample is seen."""
    with pytest.raises(ValueError, match=problem):
        MapIds(**options)


def test_map_ids_refuses_numbers_that_its_field_cannot_hold(tmp_path):
    """By the table, by ignore and by the file, which is named."""
    file = tmp_path / "ids.npy"
    np.save(file, np.array([0, 300]))
    columns = [Column("label", dtype="uint8", shape=(None,)), Column("score", dtype="float32")]
    steps = [
        MapIds(table={"1": 256}),
        MapIds(table={"1": 1}, ignore=-1),
        MapIds(file=file),
        MapIds(field="score", table={"1": 1}),
    ]

    problems = [check_steps(columns, [step])[0] for step in steps]

    assert '"map_ids" has 256 in table, and its field is uint8: 0 to 255' in problems[0]
    assert '"map_ids" has -1 in ignore' in problems[1]
    assert f'"map_ids" has 300 in {file}' in problems[2]
    assert "\"map_ids\" needs whole numbers, and 'score' is float32" in problems[3]


def npy(array):
    """The bytes of a .npy file."""
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


CUT = npy(np.arange(3))[:-5]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"text", "is not a .npy file"),
        (CUT, "is cut: it has 2 numbers, not 3"),
        (np.zeros(3), "holds float64[3]"),
        (np.zeros((2, 2), np.int64), "holds int64[2, 2]"),
    ],
    ids=["text", "cut", "floats", "a matrix"],
)
def test_a_file_of_map_ids_has_a_number_for_each_id(tmp_path, content, problem):
    """`batchd check` names the file and what it holds."""
    file = tmp_path / "ids.npy"
    file.write_bytes(content) if isinstance(content, bytes) else np.save(file, content)

    (found, *_more) = check_steps([Column("label", dtype="int64")], [MapIds(file=file)])

    assert str(file) in found
    assert problem in found
