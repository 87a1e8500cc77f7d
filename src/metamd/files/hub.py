"""Learned optimisers in folders and on the Hugging Face Hub, in the form that transformers and PyLO have."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamd.files.container import write_atomically
from metamd.files.shipped import NAME
from metamd.files.text import install, one_line, shown

if TYPE_CHECKING:
    from metamd.files.learned import LearnedOptimiser

FILE, CARD = "metamd.safetensors", "README.md"
"""What a folder holds: the file that `save` writes, and a card for readers, which is not read."""


def file_of(folder_or_name: str | os.PathLike[str], **options: Any) -> str | Path:
    """What `load` takes: the file in a folder, a path, a shipped name, or the file of a repository that was downloaded."""
    place = Path(folder_or_name)
    if place.is_dir():
        if not (place / FILE).is_file():
            raise FileNotFoundError(f"the folder {str(place)!r} holds no {FILE}. learned.save_pretrained(folder) writes it.")
        return place / FILE
    name = str(folder_or_name)
    owner, slash, repository = name.partition("/")
    if place.is_file() or NAME.fullmatch(name) or not (owner and slash and repository) or "/" in repository:
        return place if place.is_file() else name
    hub = _hub()
    try:
        return Path(hub.hf_hub_download(name, FILE, endpoint=os.environ.get("HF_ENDPOINT"), **options))
    except (hub.errors.HfHubHTTPError, hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"there is no folder {shown(name)}, and no {FILE} of that name could be had from the Hugging Face Hub "
            f"({one_line(str(error).strip().splitlines()[0])})."
        ) from None


def write(learned: "LearnedOptimiser", folder: str | os.PathLike[str]) -> Path:
    """The file and its card in a folder, which is made; a card that is there stays."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    learned.save(place / FILE)
    if not (place / CARD).exists():
        write_atomically(place / CARD, model_card(learned, "FOLDER").encode())
    return place / FILE


def push(learned: "LearnedOptimiser", name: str, *, message: str, private: bool | None, token: str | None) -> str:
    """Upload the file and its card to a repository, which is made if it is not there; the address of the commit."""
    hub = _hub()
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    api.create_repo(name, private=private, exist_ok=True)
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        write(learned, folder)
        write_atomically(Path(folder) / CARD, model_card(learned, name).encode())
        operations = [hub.CommitOperationAdd(each, Path(folder) / each) for each in (FILE, CARD)]
        return str(api.create_commit(name, operations, commit_message=message).commit_url)


def model_card(learned: "LearnedOptimiser", name: str) -> str:
    """The card of a repository, in Markdown."""
    header = learned.header
    family = (header.family or {}).get("name")
    size = f"a model of {len(header.model)} tensors" if header.model else "models by the roles of their layers"
    lines = [
        "---",
        "library_name: metamd",
        "tags: [metamd, learned-optimizer, optimizer]",
        "---",
        "",
        f"# A learned optimiser for {one_line(str(family))}" if family else "# A learned optimiser",
        "",
        "```python",
        "import metamd",
        "",
        f'learned = metamd.LearnedOptimiser.from_pretrained("{name}")',
        f"optimiser = metamd.MetaMD(model.named_parameters(), learned, steps={header.horizon or 'T'})",
        "```",
        "",
        f"It recommends: {learned.usage}. It fits {size}. Fingerprint: {learned.fingerprint()}.",
    ]
    return "\n".join(lines) + "\n"


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise ValueError(f"the Hugging Face Hub needs huggingface_hub, which is not installed. {install('hub')}") from None
    return huggingface_hub
