"""The index of pushed samples: there is nothing to scan. Daemon."""

from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.push.options import PushSource
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.survey import Survey


def _scan(source: PushSource, survey: Survey) -> SourceIndex:
    survey.progress(0)
    facts = {"push": [column.text for column in source.columns], "fields": [column.name for column in source.columns]}
    return SourceIndex.build(0, facts, {}, {})


KINDS = {PushSource: BuiltInKind(scan=_scan)}
