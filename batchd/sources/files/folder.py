"""A folder of images becomes an index. Daemon.

    folder/cat/1.jpg            class per sub-folder: labels follow the names of the classes, order as torchvision's
    folder/cat/more/2.jpg       ImageFolder has it (folders by path, then files by name), so that sample numbers agree
    folder/dog/3.jpg

    folder/1.jpg                flat: one class "", label 0

Invariant: what cannot be served as the user means it is refused here with the file's name, and is
never left out quietly.
"""

import os

from batchd.errors import SourceInvalid
from batchd.sources.files.index import GrowingIndex
from batchd.sources.files.options import FolderSource
from batchd.sources.files.reader import FilesReader, image_columns
from batchd.sources.files.walk import IMAGE_SUFFIXES, below, is_image, walk
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import WantedNames
from batchd.storage.index import SourceIndex, readable
from batchd.storage.paths import bound_of
from batchd.storage.survey import Survey


def _scan(source: FolderSource, survey: Survey) -> SourceIndex:
    growing = GrowingIndex(survey.progress, source.path_bytes)
    top = os.fsencode(source.path)
    survey.storage.at(top).look_at(top, survey)
    bound = bound_of(source.path, allow_outside_root=source.allow_outside_root)
    images_only = WantedNames(is_image, bound)
    folders, images = survey.names_in(top, images_only)
    if folders and images:
        raise SourceInvalid(
            f"{source.path} holds both class folders ({readable(folders[0])}, …) and images of its own "
            f"({readable(images[0])}, …), so it is neither one class per folder nor flat; move the images into a "
            "class folder, or name the files in a list source"
        )

    def look(folder: bytes) -> tuple[list[bytes], list[bytes]]:
        return survey.names_in(os.path.join(top, folder), images_only)  # noqa: PTH118  bytes

    for name in images:
        growing.add(name, 0)
    for label, class_name in enumerate(folders):
        found = len(growing)
        for folder, names in walk(top, class_name, look, survey, bound):
            for name in names:
                growing.add(below(folder, name), label)
        if len(growing) == found:
            raise SourceInvalid(
                f"the class folder {readable(os.path.join(top, class_name))} holds no image ({_suffixes()}); "  # noqa: PTH118
                "fill it or remove it"
            )
    if not len(growing):
        raise SourceInvalid(f"{source.path} holds no image ({_suffixes()}) and no class folder")
    return growing.finish(source.path, folders or [b""], survey)


def _suffixes() -> str:
    return b" ".join(IMAGE_SUFFIXES).decode()


KIND = BuiltInKind(
    problems=lambda source, storage: storage.at(source.path).folder_problems(source.path, is_listed=True),
    columns=lambda source, _storage: image_columns(source.path_bytes),
    scan=_scan,
    open=FilesReader.of,
)
