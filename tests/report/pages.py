"""Reading a page as a browser and a checker would: its elements, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "rect", "line"}


@dataclass
class Element:
    """One element with its attributes and the text in it, that of elements inside included."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """Every element of this name inside, in order."""
        found = [self] if self.tag == tag else []
        return found + [inner for child in self.children for inner in child.all(tag)]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs)
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        element = self.open.pop()
        assert element.tag == tag, f"</{tag}> closes <{element.tag}>"

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def parse(page: str) -> Element:
    """The document; every element must be closed in its turn."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, [element.tag for element in reader.open]
    return reader.open[0]
