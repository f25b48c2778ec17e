//! Marks for the answers in templates of known families.
//!
//! Few published templates have `{% generation %}` blocks. A known template is recognized by the hash of its text and
//! edited: the edits add blocks and, where the template drops or changes text that should be learned, keep that text.
//! Blocks begin and end where those of TRL's training templates do. Only learning answers uses the edited template;
//! prompts are rendered with the published one.

use sha2::{Digest, Sha256};

use crate::source::hex;

/// The templates of one family, and what marks their answers.
struct Known {
    family: &'static str,
    /// The SHA-256 of the text, with line feeds and without white space at its end.
    sha256: &'static str,
    edits: &'static [Edit],
}

/// Replaces every stretch of text from `from` through the next `to`, or every `from` if `to` is empty.
struct Edit {
    from: &'static str,
    to: &'static str,
    with: &'static str,
}

const fn replace(from: &'static str, with: &'static str) -> Edit {
    Edit { from, to: "", with }
}

/// ChatML templates: the block ends before the branch for messages of tools.
const BEFORE_TOOL_MESSAGES: Edit = replace(
    r#"{%- elif message.role == "tool" %}"#,
    r#"{%- endgeneration %}{%- elif message.role == "tool" %}"#,
);

/// Qwen 3 Next and later: as for Qwen 3, reasoning is kept, and an answer without any has an empty thought.
const fn with_reasoning(condition: &'static str) -> [Edit; 2] {
    let answer = Edit {
        from: condition,
        to: "{%- if message.tool_calls and",
        with: r"{{- '<|im_start|>' + message.role + '\n' }}{%- generation %}{{- '<think>\n' + reasoning_content + '\n</think>\n\n' + content }}{%- if message.tool_calls and",
    };
    [answer, BEFORE_TOOL_MESSAGES]
}

const QWEN_3_5: &[Edit] = &with_reasoning("{%- if loop.index0 > ns.last_query_index %}");

/// LFM2: the text of a message.
const LFM2_TEXT: Edit = replace(
    r#"{{- content + "<|im_end|>\n" -}}"#,
    r#"{%- set text = content + "<|im_end|>\n" -%}{%- if message["role"] == "assistant" -%}{%- generation -%}{{- text -}}{%- endgeneration -%}{%- else -%}{{- text -}}{%- endif -%}"#,
);

/// Nemotron 3: answers with calls of tools, with text, and without any.
const NEMOTRON: &[Edit] = &[
    replace("{%- set include_content", "{%- generation %}{%- set include_content"),
    Edit {
        from: r"{{- '</function>\n</tool_call>\n' -}}",
        to: "{%- else %}",
        with: r"{{- '</function>\n</tool_call>\n' -}}{%- endfor %}{{- '<|im_end|>\n' }}{%- endgeneration %}{%- else %}",
    },
    replace(r"{{- '<|im_start|>assistant\n' ~ ", r"{{- '<|im_start|>assistant\n' }}{%- generation %}{{- "),
    replace(r" ~ '<|im_end|>\n' }}", r" ~ '<|im_end|>\n' }}{%- endgeneration %}"),
    replace(
        r"{{- '<|im_start|>assistant\n<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}{%- generation %}{{- '<|im_end|>\n' }}{%- endgeneration %}",
    ),
];

/// Phi: an answer ends with `<|end|>`; the EOS at the end of the conversation belongs to a last answer.
const PHI: &[Edit] = &[
    replace(
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
        "{{'<|assistant|>\n'}}{% generation %}{{message['content'] + '<|end|>\n'}}{% endgeneration %}",
    ),
    replace(
        "{% else %}{{ eos_token }}",
        "{% elif messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% else %}\
         {{ eos_token }}",
    ),
];

/// DeepSeek: an answer to the output of tools begins with the token that ends this output.
const DEEPSEEK_ANSWER_TO_TOOLS: Edit = replace(
    "{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}",
    "{%- generation %}{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endgeneration %}",
);

const KNOWN: &[Known] = &[
    Known {
        family: "Llama 3",
        sha256: "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122",
        edits: &[replace(
            "{{ content }}",
            "{% if message['role'] == 'assistant' %}{% set answer = message['content'] | trim + '<|eot_id|>' %}\
             {{ content[:content | length - answer | length] }}{% generation %}{{ answer }}{% endgeneration %}\
             {% else %}{{ content }}{% endif %}",
        )],
    },
    Known {
        family: "Qwen 3",
        sha256: "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
        // The published template leaves out the reasoning of earlier answers, and the empty thought of most others.
        edits: &[
            Edit {
                from: "{%- if loop.index0 > ns.last_query_index %}",
                to: "{%- if message.tool_calls %}",
                with: r"{{- '<|im_start|>' + message.role + '\n' }}{%- generation %}{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- if message.tool_calls %}",
            },
            BEFORE_TOOL_MESSAGES,
        ],
    },
    Known {
        family: "Qwen 3 (2507)",
        sha256: "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
        edits: &[
            replace(
                r"{{- '<|im_start|>' + message.role + '\n' + content }}",
                r"{{- '<|im_start|>' + message.role + '\n' }}{%- generation %}{{- content }}",
            ),
            BEFORE_TOOL_MESSAGES,
        ],
    },
    Known {
        family: "Qwen 2.5",
        sha256: "55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a",
        // Answers without calls of tools are rendered by the branch for those with calls.
        edits: &[
            replace(r#" or (message.role == "assistant" and not message.tool_calls)"#, ""),
            replace(
                "{{- '<|im_start|>' + message.role }}",
                "{{- '<|im_start|>' + message.role }}{%- generation %}",
            ),
            replace("{%- if message.content %}", "{%- if message.content or not message.tool_calls %}"),
            BEFORE_TOOL_MESSAGES,
        ],
    },
    Known {
        family: "Qwen 3 VL",
        sha256: "9d879ef91075acbfb2df7e441fd79d60bacfca989cf6d511d2af45c681e94f10",
        edits: &[
            Edit {
                from: r#"{%- elif message.role == "assistant" %}"#,
                to: "}}",
                with: r#"{%- elif message.role == "assistant" %}{{- '<|im_start|>' + message.role + '\n' }}{%- generation %}"#,
            },
            BEFORE_TOOL_MESSAGES,
        ],
    },
    Known {
        family: "Qwen 3.5",
        sha256: "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
        edits: QWEN_3_5,
    },
    Known {
        family: "Qwen 3.5 (without reasoning)",
        sha256: "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
        edits: QWEN_3_5,
    },
    Known {
        family: "Qwen 3.6",
        sha256: "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
        edits: &with_reasoning("{%- if (preserve_thinking is defined"),
    },
    Known {
        family: "Qwen 3.8",
        sha256: "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041",
        edits: &with_reasoning("{%- if preserve_thinking is undefined"),
    },
    Known {
        family: "Qwen 2.5 VL",
        sha256: "a0bc6f6fc7a29a80017a433e8f03a1cc1236e838a944a2d034295a60c4f2fddb",
        edits: &[
            replace(
                "<|im_start|>{{ message['role'] }}\n",
                "<|im_start|>{{ message['role'] }}\n{% set text %}",
            ),
            replace(
                "{% endfor %}<|im_end|>\n{% endif %}",
                "{% endfor %}<|im_end|>\n{% endif %}{% endset %}{% if message['role'] == 'assistant' %}{% generation %}\
                 {{ text }}{% endgeneration %}{% else %}{{ text }}{% endif %}",
            ),
        ],
    },
    Known {
        family: "Gemma",
        sha256: "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6",
        edits: &[replace(
            "\n' + message['content'] | trim + '<end_of_turn>\n' }}",
            "\n' }}{% set text = message['content'] | trim + '<end_of_turn>\n' %}{% if role == 'model' %}\
             {% generation %}{{ text }}{% endgeneration %}{% else %}{{ text }}{% endif %}",
        )],
    },
    Known {
        family: "Gemma 3",
        sha256: "8d9e3a3c114fb2053ec500184677af4f7e5f8ec2582443cd535834e68b3ade29",
        edits: &[
            replace(
                r#"(first_user_prefix if loop.first else "") }}"#,
                r#"(first_user_prefix if loop.first else "") }}{%- set text -%}"#,
            ),
            replace(
                "{{ '<end_of_turn>\n' }}",
                "{{ '<end_of_turn>\n' }}{%- endset -%}{%- if role == 'model' -%}{%- generation -%}{{ text }}\
                 {%- endgeneration -%}{%- else -%}{{ text }}{%- endif -%}",
            ),
        ],
    },
    Known {
        family: "gpt-oss",
        sha256: "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",
        // A message has several channels, so its header belongs to the answer.
        edits: &[
            replace(
                r#"{%- if "tool_calls" in message %}"#,
                r#"{%- generation %}{%- if "tool_calls" in message %}"#,
            ),
            replace(
                "{%- elif message.role == 'tool' -%}",
                "{%- endgeneration %}{%- elif message.role == 'tool' -%}",
            ),
        ],
    },
    Known {
        family: "Phi 3",
        sha256: "dcaee66df77bfbb789ec541fe713218da30225a526f1db97138fc39ee6dc56aa",
        edits: PHI,
    },
    Known {
        family: "Phi 3.5",
        sha256: "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90",
        edits: PHI,
    },
    Known {
        family: "DeepSeek-V3",
        sha256: "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64",
        edits: &[
            replace(
                "{%- for tool in message['tool_calls'] %}",
                "{%- generation %}{%- for tool in message['tool_calls'] %}",
            ),
            // Values that are `null` are absent here.
            replace("message['content'] is none", "message['content'] is not string"),
            // The published template fails for arguments that are a mapping.
            replace(
                "tool['function']['arguments']",
                "(tool['function']['arguments'] if tool['function']['arguments'] is string else \
                 tool['function']['arguments'] | tojson)",
            ),
            replace(
                "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}",
                "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endgeneration %}",
            ),
            DEEPSEEK_ANSWER_TO_TOOLS,
            replace(
                "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}",
                "{%- generation %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endgeneration %}",
            ),
        ],
    },
    Known {
        family: "DeepSeek-R1 (distilled)",
        sha256: "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f",
        edits: &[
            replace(
                "{%- for tool in message['tool_calls']%}",
                "{%- generation %}{%- for tool in message['tool_calls']%}",
            ),
            replace("message['content'] is not none", "message['content'] is string"),
            replace("message['content'] is none", "message['content'] is not string"),
            replace(
                "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}",
                "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}{%- endgeneration %}",
            ),
            DEEPSEEK_ANSWER_TO_TOOLS,
            // The published template leaves out the reasoning.
            Edit {
                from: "{% set content = message['content'] %}",
                to: "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}",
                with: "{%- generation %}{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}\
                       {%- endgeneration %}",
            },
        ],
    },
    Known {
        family: "Aya Expanse",
        sha256: "90c33aee14aa2a226127516d48ee9184c9b90745d4a04c484621ec2e82fb712c",
        edits: &[replace(
            "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}",
            "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% generation %}{{ content.strip() }}<|END_OF_TURN_TOKEN|>\
             {% endgeneration %}",
        )],
    },
    Known {
        family: "Tiny Aya",
        sha256: "2147c474f41b522b7296f74692b9f31e45f49a31465960576a9d321339c5915a",
        // One text ends the messages of all roles.
        edits: &[
            replace(
                "{{ message['content'] }}<|END_RESPONSE|>",
                "{% generation %}{{ message['content'] }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% endgeneration %}",
            ),
            replace(
                "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}",
                "{% endif %}{{ '' if role in ['assistant', 'chatbot'] else '<|END_OF_TURN_TOKEN|>' }}{% endfor %}",
            ),
        ],
    },
    Known {
        family: "GLM 4.5",
        sha256: "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
        // An answer ends with the token that begins the next message, which that message leaves out; a last answer ends
        // with that of a user's message.
        edits: &[
            replace(
                "{%- if m.role == 'user' -%}<|user|>",
                "{%- set begun = not loop.first and loop.previtem.role == 'assistant' -%}\
                 {%- if m.role == 'user' -%}{{- '' if begun else '<|user|>' }}",
            ),
            replace(
                "{%- if loop.index0 > ns.last_user_index",
                "{%- generation %}{%- if loop.index0 > ns.last_user_index",
            ),
            Edit {
                from: "</tool_call>{% endfor %}",
                to: "{%- elif m.role == 'tool' -%}",
                with: "</tool_call>{% endfor %}<|observation|>{%- else -%}\
                       {{- '<|system|>' if not loop.last and loop.nextitem.role == 'system' else '<|user|>' }}{%- endif %}\
                       {%- endgeneration %}{%- elif m.role == 'tool' -%}",
            },
            replace(
                r#"{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}"#,
                r#"{%- if not begun and (loop.first or loop.previtem.role != "tool") %}"#,
            ),
            replace("<|observation|>{% for tr", "{{- '' if begun else '<|observation|>' }}{% for tr"),
            Edit {
                from: "{%- elif m.role == 'system' -%}",
                to: "<|system|>",
                with: "{%- elif m.role == 'system' -%}{{- '' if begun else '<|system|>' }}",
            },
        ],
    },
    Known {
        family: "LFM2",
        sha256: "cef187400d62a59507aab3a642ea9a8d2a2ef263562bc3430560e116945273cf",
        edits: &[LFM2_TEXT],
    },
    Known {
        family: "LFM2 (with calls of tools)",
        sha256: "5504d163d879bfb6fd4135b7fa3d56768b2e69dd718338f7b146750289f46ab0",
        edits: &[
            Edit {
                from: r#"{{- render_tool_calls(message["tool_calls"]) -}}"#,
                to: "{%- else -%}",
                with: r#"{{- render_tool_calls(message["tool_calls"]) -}}{{- "<|im_end|>\n" -}}{%- endgeneration -%}{%- else -%}"#,
            },
            replace(
                r#"{%- if content and content != "null" -%}"#,
                r#"{%- generation -%}{%- if content and content != "null" -%}"#,
            ),
            LFM2_TEXT,
        ],
    },
    Known {
        family: "Nemotron 3 Nano",
        sha256: "43a92aacc2e169bb37055e4d8b0df31edfdc8657d8c387fcf98254cb246e626a",
        edits: NEMOTRON,
    },
    Known {
        family: "Nemotron 3 Super",
        sha256: "3b74d76d8b903752e764cae114ae8ae2f24cd260466cf672570c745219573d28",
        edits: NEMOTRON,
    },
    Known {
        family: "Nemotron 3 Ultra",
        sha256: "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc",
        edits: NEMOTRON,
    },
    Known {
        family: "Nemotron 3.5 Lightning",
        sha256: "58933db77d3099b4f78c55a38347a72e1ea05b97d6bd8f38775303dc0194e0a9",
        edits: NEMOTRON,
    },
    Known {
        family: "Muse Glimmer",
        sha256: "6cd0e94d9b489fdb9a000743791f20e7e52b62c1e5cbb66fcc91c6716595223a",
        // A message has several channels, so its header belongs to the answer.
        edits: &[
            replace("{%- elif role == 'assistant' -%}", "{%- elif role == 'assistant' -%}{%- generation -%}"),
            Edit {
                from: "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}",
                to: "{%- endif -%}",
                with: "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}{%- endif -%}{%- endgeneration -%}",
            },
        ],
    },
];

/// The family whose published template this is, and the template with marks around answers.
pub(super) fn marked(source: &str) -> Option<(&'static str, String)> {
    let (known, text) = find(source)?;
    let edited = known.edits.iter().try_fold(text, |text, edit| edit.apply(&text));
    Some((known.family, edited.expect("a known template has the texts that its edits replace")))
}

/// The known template with this text, and the text that its edits read.
fn find(source: &str) -> Option<(&'static Known, String)> {
    let text = source.replace("\r\n", "\n");
    let text = text.trim_end();
    let sha256 = hex(&Sha256::digest(text));
    let known = KNOWN.iter().find(|known| known.sha256 == sha256)?;
    Some((known, text.to_owned()))
}

impl Edit {
    /// The edited text; `None` if it has nothing to replace.
    fn apply(&self, text: &str) -> Option<String> {
        let (mut edited, mut rest) = (String::with_capacity(text.len()), text);
        while let Some(start) = rest.find(self.from) {
            let behind = &rest[start + self.from.len()..];
            let Some(end) = behind.find(self.to) else { break };
            edited.push_str(&rest[..start]);
            edited.push_str(self.with);
            rest = &behind[end + self.to.len()..];
        }
        (rest.len() < text.len()).then(|| edited + rest)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    /// Every known template has all the texts that its edits replace.
    #[test]
    fn all_known_templates_are_edited() {
        let content = include_str!("../../tests/goldens/known_templates/known_templates.json");
        let content: Value = serde_json::from_str(content).unwrap();
        let mut families = BTreeSet::new();
        for source in content["templates"].as_object().unwrap().values() {
            let Some((known, text)) = find(source.as_str().unwrap()) else { continue };
            families.insert(known.family);
            known.edits.iter().fold(text, |text, edit| {
                let edited = edit.apply(&text);
                edited.unwrap_or_else(|| panic!("{} has no `{}`", known.family, edit.from))
            });
        }
        assert_eq!(families, KNOWN.iter().map(|known| known.family).collect());
    }

    #[test]
    fn texts_that_are_absent_are_noticed() {
        let edit = Edit { from: "a", to: "c", with: "x" };
        assert_eq!(edit.apply("abcd"), Some("xd".to_owned()));
        for text in ["bcd", "abd"] {
            assert_eq!(edit.apply(text), None);
        }
    }
}
