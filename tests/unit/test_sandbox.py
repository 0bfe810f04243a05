"""Tests of samples/ (sandbox, template): a stranger's chat template cannot fill the memory."""

import pytest

jinja2 = pytest.importorskip("jinja2", reason="the [data] extra is not installed")

from trimtab.errors import ConfigError  # noqa: E402
from trimtab.samples.template import compile_template  # noqa: E402


@pytest.mark.parametrize(
    "template",
    [
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, '10000000000') }}",
        "{{ ('{:>999999}' * 999).format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=2) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "{{ range(99999) | list | join('x' * 99999) }}",
        "{{ ('x' * 99999).join(range(99999) | map('string') | list) }}",
        "{{ range(99999) | list | tojson(indent=99999999) }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
        "{{ ('\t' * 100000).expandtabs(100000) }}",
        "{{ ('x\n' * 100000) | indent(100000) }}",
        "{{ ('http://a.b ' * 999999) | urlize }}",
        "{% for i in range(99999) %}{{ 'x' | center(1000000) }}{% endfor %}",
        "{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_a_template_that_makes_too_much_is_refused(template: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        compile_template(template, {})([], None)


def test_a_template_makes_what_real_ones_make() -> None:
    template = (
        '{% for m in messages %}{{ \'{{"role": "{}", "text": {}}}\'.format(m.role, m.content | tojson(indent=2)) }}'
        "{{ '%-4s|' % m.role ~ loop.index ~ m.content.replace('a', 'bb') ~ ['x', 1] | join(', ') }}{% endfor %}"
    )
    told = compile_template(template, {})([{"role": "user", "content": "a" * 1_000_000}], None)
    assert told == '{"role": "user", "text": "' + "a" * 1_000_000 + '"}user|1' + "b" * 2_000_000 + "x, 1"


def test_a_template_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the chat template is not valid Jinja: .*recursion"):
        compile_template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})
