"""The parts of a data set, such as train and val, for ``batchd init``. In the user's shell.

    place -- recognise --> training part -- its scan, a few samples --> DataPart
                 |
                 +-- the others that names show, by the same kind -----> DataPart, or why not

Another part has the fields of the training part, with the same shapes, and the same numbers of
classes. A class that another part has alone is numbered behind those of the training part, so no
label of the training depends on it.

Invariant: nothing of a part is served with labels that mean something else in the training part.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from batchd.cli.first_config import Facts, look_at
from batchd.config.tree import Config
from batchd.data.sources import recognise
from batchd.data.sources.arrays.options import NpySource, NpzSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import FolderSource, GlobSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import ReportProgress, Survey
from batchd.errors import SourceInvalid
from batchd.runtime.directories import default_cache_dir

TRAINING = "train"
PLACE_KEYS = ("path", "root", "files", "shards", "image_root", "images", "segments", "annotations", "part")
"""Keys of a source that say where its samples are, and not what they are."""


class DataPart(NamedTuple):
    """A part of a data set, or all of the data, and the facts about it."""

    name: str
    finding: recognise.FoundSource
    source: SourceOptions
    class_names: tuple[str, ...]
    """In the order of their numbers; () if there are no classes."""
    facts: Facts

    @property
    def has_class_folders(self) -> bool:
        """True if the classes are folders, not values in the data."""
        return isinstance(self.source, (FolderSource, GlobSource, VideoSource)) and bool(self.class_names)


class PartSearch:
    """A look at data. ``progress``: a counter on the terminal, by noun."""

    def __init__(
        self, storage: Storage, progress: Callable[[str], ReportProgress], *, allow_outside_root: bool
    ) -> None:
        self._storage, self._survey = storage, Survey(progress("files"), storage=storage)
        self._count, self._allow_outside_root = progress("samples"), allow_outside_root

    def parts(self, place: Path) -> list[DataPart]:
        """The training part, or all of the data, and then the others. Raises ``SourceInvalid``.

        Why there is no stream of a part is a note of the first.
        """
        training = self._part("", place, recognise.recognise(place, self._survey))
        found: list[DataPart] = []
        notes: list[str] = []
        for name in training.finding.recognised.others:
            try:
                found.append(self._other(name, place, training))
            # invalid options, such as those of classes
            except (SourceInvalid, ValueError) as error:
                notes.append(f"no stream of the part {name}: {error}")
        if found:
            training = training._replace(name=TRAINING)
        more = [name for part in found for name in part.class_names if name not in training.class_names]
        classes = [*training.class_names, *dict.fromkeys(more)]
        if more:
            training = training._replace(source=_with_classes(training.source, classes))
            notes.append(
                f"classes that other parts have alone, numbered behind the others: {', '.join(dict.fromkeys(more))}"
            )
        parts = [training, *(part._replace(source=_as_part(training.source, part.source, classes)) for part in found)]
        return _with_left_out(parts, notes)

    def _part(self, name: str, place: Path, finding: recognise.FoundSource) -> DataPart:
        """Scan recognised data, without files that cannot be read, and read a few samples."""
        while True:
            source = finding.recognised.source
            if self._allow_outside_root and hasattr(source, "allow_outside_root"):
                source = replace(source, allow_outside_root=True)
            try:
                return self._scanned(name, finding, source)
            except SourceInvalid as error:
                files, is_other = recognise.without_blamed(finding.files, type(source), str(error))
                if not is_other:
                    raise
                try:
                    finding = recognise.recognise_files(place, files, self._survey, [finding.kind])
                except SourceInvalid:  # it was the last one of its part
                    raise error from None

    def _scanned(self, name: str, finding: recognise.FoundSource, source: SourceOptions) -> DataPart:
        index = scan_source(source, self._count, IndexCache(default_cache_dir()), self._storage)
        class_names = tuple(name for name in index.class_names if name)
        return DataPart(name, finding, source, class_names, look_at(source, index, self._storage))

    def _other(self, name: str, place: Path, training: DataPart) -> DataPart:
        """Another part beside the training part. Raises ``SourceInvalid`` or ``ValueError``."""
        files = training.finding.files._replace(part=name)
        part = self._part(name, place, recognise.recognise_files(place, files, self._survey, [training.finding.kind]))
        if training.has_class_folders != part.has_class_folders:
            which = "the training part" if part.has_class_folders else "it"
            remedy = "a source of type list has them from lines of path and label"
            raise SourceInvalid(f"{which} has no class folders, so its labels are not known; {remedy}")
        classes = list(dict.fromkeys((*training.class_names, *part.class_names)))
        if isinstance(training.source, FolderSource) and isinstance(part.source, GlobSource):
            part = self._as_folder(part, classes)
        source = _as_part(_with_classes(training.source, classes), part.source, classes)
        if not part.has_class_folders:
            part = self._scanned(name, part.finding, source)._replace(class_names=part.class_names)
        theirs, ours = (kind_of(one.source).columns(one.source, self._storage) for one in (training, part))
        if theirs != ours:
            shown = ", ".join(f"{column.name} ({column.text})" for column in ours if column not in theirs)
            raise SourceInvalid(f"its fields are not those of the training part: {shown or 'some are missing'}")
        return part

    def _as_folder(self, part: DataPart, classes: Sequence[str]) -> DataPart:
        """The part as a folder, if it is none only since classes of the training have no image."""
        assert isinstance(part.source, GlobSource), "so are images where a folder does not do"
        outside = part.source.allow_outside_root
        folder = FolderSource(path=part.source.root, classes=tuple(classes), allow_outside_root=outside)
        with suppress(SourceInvalid):
            found = self._scanned(part.name, part.finding, folder)
            if found.facts.samples == part.facts.samples:
                return found._replace(source=replace(folder, classes=()))
        return part


def training_stream(source: SourceOptions, config: Config | None) -> str | None:
    """The stream of the training folder beside a folder of another part; None if there is none."""
    if config is None or not isinstance(source, FolderSource) or source.path.name.lower() not in recognise.PARTS:
        return None
    wanted = {source.path.with_name(name) for name in recognise.TRAINING_PARTS} - {source.path}
    folders = ((name, stream.source) for name, stream in config.streams.items())
    return next((name for name, one in folders if isinstance(one, FolderSource) and one.path in wanted), None)


def _as_part(training: SourceOptions, part: SourceOptions, classes: Sequence[str]) -> SourceOptions:
    """The source of another part, with the fields of the training part and the numbers of classes.

    Of two folders, the other one takes its classes from the stream of the training part.
    """
    if isinstance(part, FolderSource) and classes and not isinstance(training, FolderSource):
        return replace(part, classes=tuple(classes))
    if isinstance(part, (GlobSource, VideoSource)):
        return replace(part, classes=tuple(classes)) if part.classes == "folder" else part
    if type(part) is not type(training) or isinstance(part, (FolderSource, NpySource, NpzSource)):
        return part
    return replace(training, **{one.name: getattr(part, one.name) for one in fields(part) if one.name in PLACE_KEYS})


def _with_classes(source: SourceOptions, classes: Sequence[str]) -> SourceOptions:
    has_names = isinstance(source, (FolderSource, GlobSource, VideoSource)) or (
        isinstance(source, CsvSource) and source.classes
    )
    return replace(source, classes=tuple(classes)) if has_names else source


def _with_left_out(parts: Sequence[DataPart], notes: Sequence[str]) -> list[DataPart]:
    """The parts, of which the first has the notes, and the files that all of them leave out."""
    used = {name for part in parts for name in part.finding.recognised.names}
    first, *others = parts
    recognised = first.finding.recognised
    recognised = recognised._replace(notes=(*notes, *recognised.notes))
    left_out = [name for name in first.finding.left_out if name not in used]
    found = first.finding._replace(recognised=recognised, left_out=left_out)
    return [
        first._replace(finding=found),
        *(part._replace(finding=part.finding._replace(left_out=[])) for part in others),
    ]
