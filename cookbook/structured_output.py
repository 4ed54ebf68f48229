"""Answers that are data: a pydantic object, the raw message beside it, a choice, a pattern, and one that was cut.

A grammar holds the form; what stands in it is up to the model, and this one is small. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, Field

from langchain_pagedllm import ChatPagedLLM, PagedLLM

TEXT = "Ada Lovelace was born in London in 1815. She wrote the first program for a machine."


class Person(BaseModel):
    """A person in a text."""

    name: str = Field(description="The full name.", max_length=40)
    year_of_birth: int = Field(ge=1000, le=2100)
    kind: Literal["scientist", "artist", "politician"]


def run(model: ChatPagedLLM, llm: PagedLLM) -> dict[str, Any]:
    """All kinds, over the two models of one engine."""
    question = f"Who is this text about? {TEXT}"
    person = model.with_structured_output(Person).invoke(question)
    print(f"object:  {person!r}")
    with_raw: Any = model.with_structured_output(Person, include_raw=True).invoke(question)
    print(f"raw:     {with_raw['raw'].text}")
    mood = llm.bind(structured_outputs={"choice": ["good", "bad"]}).invoke("The food was great. The review is")
    print(f"choice:  {mood}")
    date = llm.bind(structured_outputs={"regex": r"\d{4}-\d{2}-\d{2}"}).invoke("Today's date is ")
    print(f"pattern: {date}")
    is_cut = False
    try:
        # Too few tokens for an object. It is never completed by guesswork.
        model.model_copy(update={"max_tokens": 4}).with_structured_output(Person).invoke(question)
    except OutputParserException as error:
        is_cut = True
        print(f"cut:     {str(error).splitlines()[0][:90]}")
    return {
        "person": person.model_dump() if isinstance(person, Person) else None,
        "parsed_is_equal": with_raw["parsed"] == person,
        "choice": mood,
        "date": date,
        "cut_is_reported": is_cut,
    }


def main() -> None:
    """Ask the embedded model, or another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or path (default: $PAGEDLLM_MODEL, else the embedded model)")
    options = parser.parse_args()
    named = {"model": options.model} if options.model else {}
    model = ChatPagedLLM(temperature=0, max_tokens=64, **named)
    print(json.dumps(run(model, PagedLLM(temperature=0, max_tokens=16, **named))))


if __name__ == "__main__":
    main()
