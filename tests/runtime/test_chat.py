"""Chat messages to prompt text."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from xpuc.errors import RequestError
from xpuc.frontend.chat_templates import builtin_template
from xpuc.frontend.gguf import open_gguf
from xpuc.runtime.chat import render

GOLDEN = Path(__file__).parents[1] / "golden"
HELLO = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "system", "content": " Be terse. "},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Why?"},
]


def rendered(template, messages=HELLO, **options):
    return render(template, messages, bos_token="<s>", eos_token="</s>", **options)


def check_prompts(template, name):
    expected = json.loads((GOLDEN / f"tokenizer_{name}.json").read_text())
    chats = {k: v for k, v in expected["prompts"].items() if v["messages"]}
    assert set(chats) == {"chat", "chat_multi"}
    for prompt in chats.values():
        text = render(
            template, prompt["messages"], bos_token=expected["bos"], eos_token=expected["eos"]
        )
        assert text == prompt["text"]


@pytest.mark.model
def test_smollm2_prompts(smollm2_gguf):
    check_prompts(open_gguf(smollm2_gguf).metadata["tokenizer.chat_template"], "smollm2")


def test_gemma_prompts_from_the_builtin_template():
    found = builtin_template({"<start_of_turn>", "<end_of_turn>"})
    assert found is not None
    assert found[0] == "gemma"
    check_prompts(found[1], "gemma3")


def test_builtin_llama3():
    name, template = builtin_template(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    assert name == "llama3"
    assert rendered(template, TALK) == (
        "<|start_header_id|>system<|end_header_id|>\n\nBe terse.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_builtin_chatml():
    name, template = builtin_template(["<|im_start|>", "<|im_end|>"])
    assert name == "chatml"
    assert rendered(template, TALK[:2], add_generation_prompt=False) == (
        "<|im_start|>system\n Be terse. <|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
    )
    assert rendered(template).endswith("<|im_start|>assistant\n")


def test_no_builtin_for_half_a_set_of_markers():
    assert builtin_template(["<start_of_turn>", "<|im_start|>"]) is None


def test_what_a_template_is_told():
    template = "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools }}{{ thinking }}"
    assert rendered(template) == "<s></s>TrueNone"
    assert (
        rendered(template, add_generation_prompt=False, tools=[], variables={"thinking": 1})
        == "<s></s>False[]1"
    )


def test_block_lines_leave_no_white_space():
    lines = ["{% for m in messages %}", "    {% if true %}", "{{ m.content }}", "    {% endif %}"]
    template = "\n".join([*lines, "{% endfor %}", "."])
    assert rendered(template) == "hello\n."


def test_json_is_written_as_it_is():
    tools = [{"name": "caf\u00e9 <b> & 'x'", "n": 1}]
    assert rendered("{{ tools | tojson }}", tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert rendered("{{ tools | tojson(indent=2) }}", tools=tools) == json.dumps(
        tools, ensure_ascii=False, indent=2
    )


def test_loop_controls_and_generation_marks():
    template = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}[{{ m.role }}]{% endgeneration %}{% endfor %}"
    )
    assert rendered(template, TALK) == "[system][user]"


def test_the_date():
    before = datetime.now().strftime("%Y-%m-%d")
    got = rendered("{{ strftime_now('%Y-%m-%d') }}")
    assert got in (before, datetime.now().strftime("%Y-%m-%d"))


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("ok\n{% if %}", "chat template: line 2: "),
        ("{{ messages[0].nothing.at_all }}", "chat template: "),
        ("{{ messages[0].content + 1 }}", "chat template: "),
        ("{{ 1 // 0 }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "chat template: "),
        ("{% for i in range(10000000) %}{% endfor %}", "chat template: "),
        ("{{ 'x' | no_such_filter }}", "chat template: line 1: "),
        ("{% include 'other' %}", "chat template: "),
    ],
)
def test_faults_in_a_template_are_the_request_s(template, found):
    with pytest.raises(RequestError) as error:
        rendered(template)
    assert found in error.value.message
    assert "--raw" in error.value.hint
