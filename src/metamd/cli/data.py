"""`metamd data`: list, download and check the datasets."""

from metamd.cli import data_commands as commands
from metamd.cli.options import Data, DataFetch, DataList, DataVerify


def run(options: Data) -> int:
    """Carry out one of the four actions; wrong data end in a sentence and exit code 2."""
    action = options.action
    if isinstance(action, DataList):
        commands.list_datasets(json=action.json)
    elif isinstance(action, DataFetch):
        commands.fetch(action.name, split=action.split, force=action.force, json=action.json)
    elif isinstance(action, DataVerify):
        commands.verify(action.name, json=action.json)
    else:
        commands.path(action.name, split=action.split, json=action.json)
    return 0
