"""Chat templates for GGUFs that carry none, chosen by the turn markers in the vocabulary."""

from __future__ import annotations

from collections.abc import Container

_GEMMA = """\
{%- set pending = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- set pending.system = pending.system + message['content'] | trim -%}
    {%- else -%}
        {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
        {{- '<start_of_turn>' + role + '\\n' -}}
        {%- if pending.system and role != 'model' -%}
            {{- pending.system + '\\n\\n' -}}
            {%- set pending.system = '' -%}
        {%- endif -%}
        {{- message['content'] | trim + '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

_LLAMA3 = """\
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# name, the tokens that open and close its turns, template
_BUILTIN = (
    ("gemma", ("<start_of_turn>", "<end_of_turn>"), _GEMMA),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA3),
    ("chatml", ("<|im_start|>", "<|im_end|>"), _CHATML),
)


def builtin_template(tokens: Container[str]) -> tuple[str, str] | None:
    """(name, template) of the family whose turn markers are all tokens; None where none fits."""
    for name, markers, template in _BUILTIN:
        if all(marker in tokens for marker in markers):
            return name, template
    return None
