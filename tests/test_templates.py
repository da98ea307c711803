"""Templates read as the Python or the picture that they print, and decide nothing: a condition is one name."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest
from jinja2 import nodes

from dsl.render import environment
from dsl.resources import templates_folder

FOLDER = templates_folder()
TEMPLATES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.jinja"))
PICTURES = [template for template in TEMPLATES if template.endswith(".svg.jinja")]

DECISIONS = (nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.BinExpr, nodes.UnaryExpr, nodes.Test, nodes.CondExpr)
BANNED = ("make_block_ptr", "tl.advance")


def text_of(template: str) -> str:
    return Path(FOLDER, template).read_text(encoding="utf-8")


def tree_of(template: str) -> nodes.Template:
    return environment().parse(text_of(template))


def as_python(text: str) -> str:
    """The template with a name in place of each expression; its control lines are comments already."""
    text = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}", "placeholder", text, flags=re.DOTALL)
    return textwrap.dedent(text.lstrip("\n"))


def test_there_are_templates():
    assert "module.py.jinja" in TEMPLATES


@pytest.mark.parametrize("template", [template for template in TEMPLATES if template not in PICTURES])
def test_a_template_is_python(template: str):
    ast.parse(as_python(text_of(template)), template)


@pytest.mark.parametrize("template", PICTURES)
def test_a_picture_is_xml_and_escapes_what_it_prints(template: str):
    text = re.sub(r"^[ \t]*#% .*$", "", as_python(text_of(template)), flags=re.MULTILINE)
    ElementTree.fromstring(text.strip().encode())
    autoescape = environment().autoescape
    assert callable(autoescape) and autoescape(template)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_says_what_it_reads(template: str):
    assert text_of(template).startswith("{#-")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_condition_is_one_name(template: str):
    for condition in tree_of(template).find_all(nodes.If):
        for branch in (condition, *condition.elif_):
            assert isinstance(branch.test, (nodes.Name, nodes.Getattr)), f"{template}:{branch.lineno}"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_decides_and_computes_nothing(template: str):
    for decision in tree_of(template).find_all(DECISIONS):
        pytest.fail(f"{template}:{decision.lineno}: {type(decision).__name__} belongs to a property of the plan")


@pytest.mark.parametrize("template", TEMPLATES)
def test_block_pointers_are_banned(template: str):
    assert not [name for name in BANNED if name in text_of(template)]
