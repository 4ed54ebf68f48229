"""What ``rag_reuse.py`` asks: documents about invented places, questions about them, and orders to compare with.

Which documents a question finds follows Zipf's law: a few are found all the time, most of them hardly ever.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_core.documents import Document

__all__ = ["INSTRUCTIONS", "Question", "by_greedy", "by_popularity", "make_documents", "make_questions", "num_shared"]

# 128 tokens of SmolLM2.
INSTRUCTIONS = (
    "You answer questions of travellers about the villages of the Tarn valley. You are given documents from the "
    "register of the valley, one for each village, and a question about one of the villages. Find the document about "
    "that village and answer from it alone. The documents come in no particular order, and most of them have nothing "
    "to do with the question. Answer with the name or the number that is asked for and nothing else. Do not explain "
    "the answer, do not repeat the question, and do not mention the documents. If no document tells the answer, say "
    "that the register does not tell. Keep to this in all your answers."
)

_HEADS = ("Alder", "Bram", "Corn", "Dunn", "Elling", "Fen", "Garth", "Hollin", "Ister", "Jarrow", "Kelm", "Lox")
_TAILS = ("brook", "ford", "holm", "stead", "wick")
_FIRST_NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Edith", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Leo")
_LAST_NAMES = ("Abel", "Brandt", "Castor", "Dorn", "Eklund", "Frost", "Grimm", "Hale", "Ivers", "Jansen", "Kraus")
_CRAFTS = ("bells", "boats", "brooms", "candles", "cheese", "clocks", "gloves", "kites", "ropes", "saddles", "violins")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question.

    Args:
        text: What is asked; no two are the same.
        found: Which documents the retriever finds for it, by number.
        gold: What a right answer contains.
    """

    text: str
    found: tuple[int, ...]
    gold: str


def make_documents(count: int, fit: Callable[[str], str], *, seed: int = 0) -> list[Document]:
    """Documents about one village each, with a mayor and a craft of its own in the metadata.

    Args:
        fit: Cuts a text to the length that documents shall have.
        seed: Of mayors, crafts and numbers.

    Raises:
        ValueError: There are not so many names.
    """
    names = [head + tail for tail in _TAILS for head in _HEADS]
    if count > len(names):
        raise ValueError(f"count={count}: there are names for {len(names)} documents")
    rng = random.Random(7 + seed)
    mayors = [f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES]
    rng.shuffle(mayors)
    return [_make_document(name, mayor, rng, fit) for name, mayor in zip(names[:count], mayors, strict=False)]


def _make_document(name: str, mayor: str, rng: random.Random, fit: Callable[[str], str]) -> Document:
    craft, year, height = rng.choice(_CRAFTS), rng.randrange(1100, 1900), rng.randrange(200, 1800)
    facts = [
        f"{name} was first mentioned in {year}.",
        f"It lies {height} metres above the sea and has {rng.randrange(90, 2500)} inhabitants.",
        f"Its people have made {craft} for longer than anybody remembers.",
        f"The market of {name} is held on the first {rng.choice(('Monday', 'Tuesday', 'Friday'))} of the month.",
        f"The bridge has {rng.randrange(2, 12)} arches and was built in {rng.randrange(1700, 1990)}.",
        f"The bus to the station takes {rng.randrange(8, 70)} minutes and costs {rng.randrange(2, 9)} crowns.",
        f"The library of {name} has {rng.randrange(300, 9000)} books and opens three days a week.",
        f"A footpath leads from the church past {rng.randrange(3, 30)} farms to the old mill in the woods.",
        f"The fire brigade owns {rng.randrange(1, 4)} engines, of which the oldest is shown to visitors in summer.",
        "In winter the road is cleared before seven in the morning, except on Sundays and holidays.",
        f"There are {rng.randrange(2, 9)} inns, and rooms should be booked a week ahead from June to September.",
        f"The school teaches {rng.randrange(20, 300)} children, who come from all the hamlets around {name}.",
        "The register was last brought up to date by the clerk of the valley, who walked to every house.",
        "Letters are collected at noon, and parcels may be left with the baker or at the forge behind the church.",
    ]
    text = f"The mayor of {name} is {mayor}. " + " ".join(facts)
    return Document(id=name, page_content=fit(text), metadata={"mayor": mayor})


def make_questions(documents: Sequence[Document], count: int, *, num_found: int = 5, seed: int = 0) -> list[Question]:
    """Questions that find ``num_found`` documents each, the n-th most popular one with weight 1/n.

    The question is about any of them: where the gold document stands is then by chance in the retriever's order as
    well, as it is in the others.
    """
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    questions = []
    for number in range(count):
        found: dict[int, None] = {}
        while len(found) < num_found:
            found[rng.choices(range(len(documents)), weights)[0]] = None
        about = documents[rng.choice(list(found))]
        text = f"Visitor {number + 1} asks: who is the mayor of {about.id}?"
        questions.append(Question(text=text, found=tuple(found), gold=about.metadata["mayor"]))
    return questions


# --- What a prefix cache without limits makes of orders ---


def num_shared(orders: Sequence[Sequence[int]]) -> int:
    """Over all prompts, the documents at their beginning that an earlier prompt began with too."""
    seen: set[tuple[int, ...]] = set()
    count = 0
    for order in orders:
        heads = [tuple(order[: length + 1]) for length in range(len(order))]
        count += sum(head in seen for head in heads)
        seen.update(heads)
    return count


def by_greedy(found: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each question the best of all its orders, given all that was served before."""
    seen: set[tuple[int, ...]] = set()
    served = []
    for documents in found:
        best = max(
            itertools.permutations(documents),
            key=lambda order: sum(order[: length + 1] in seen for length in range(len(order))),
        )
        seen.update(best[: length + 1] for length in range(len(best)))
        served.append(best)
    return served


def by_popularity(found: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each question by how often a document is found in the whole trace, which nobody knows in advance."""
    uses: dict[int, int] = {}
    for number in itertools.chain.from_iterable(found):
        uses[number] = uses.get(number, 0) + 1
    return [tuple(sorted(documents, key=lambda number: (-uses[number], number))) for documents in found]
