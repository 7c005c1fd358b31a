"""Chat templates in the style of families that know tools, small enough to read."""

HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer in <tool_call></tool_call> tags.\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MISTRAL = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% for message in messages %}"
    "{% if loop.last and tools is not none %}[AVAILABLE_TOOLS]{{ tools | length }}{% endif %}"
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}[TOOL_CALLS]{{ call | tojson }}{% endfor %}"
    "{% if message.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}"
)
LLAMA3_JSON = (
    "{% if tools is not none %}<|start_header_id|>system{{ tools[0] | tojson(indent=4) }}"
    'Respond in the format {"name": function name, "parameters": arguments}.{% endif %}'
    "{% for message in messages %}<|start_header_id|>{{ message.role }}{{ message.content }}{% endfor %}"
)
XML_CALLS = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call><function={{ messages }}></function></tool_call>"
UNKNOWN_CALLS = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages }}"
