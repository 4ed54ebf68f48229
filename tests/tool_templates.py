"""Chat templates that know tools, each in the manner of a family of models."""

from __future__ import annotations

__all__ = ["HERMES", "LLAMA3", "MISTRAL", "NULL_TEXT", "TOOL_TEMPLATES"]

# Hermes and Qwen: calls and answers in tags, answers in a user's turn.
HERMES = """{% for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}' }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Llama 3: one call at a time, which takes the place of the text; answers as JSON.
LLAMA3 = """{% for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model makes one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|im_start|>assistant\\n{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}<|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>ipython\\n' ~ m.content | tojson ~ '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content | trim ~ '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Mistral: ids of nine characters, answers with the id and the name of their call.
MISTRAL = """{% for m in messages %}
{%- if m.tool_calls is defined %}{{ '[CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of tool calls must have 9 characters') }}{% endif %}
{{- call.function | tojson ~ ' id ' ~ call.id ~ (', ' if not loop.last else ']') }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '[RESULT]' ~ m.content ~ ' of ' ~ m.name ~ ' ' ~ m.tool_call_id ~ '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>' }}
{%- endif %}
{%- endfor %}"""

# Some want the arguments as a text, and show calls only of a turn whose content is null.
NULL_TEXT = """{% for m in messages %}
{%- if m.role == 'assistant' and m.content is none or m.tool_calls %}
{%- if m.content is not none and not m.content %}{{ raise_exception('content must be null or a text') }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls %}{{ '<|im_start|>' + call.type + ' ' + call.function.name + '\\n' }}
{{- call.function.arguments + '<|im_end|>' }}{% endfor %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}"""

TOOL_TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "null and text": NULL_TEXT}
