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
];

/// The family whose published template this is, and the template with marks around answers.
pub(super) fn marked(source: &str) -> Option<(&'static str, String)> {
    let text = source.replace("\r\n", "\n");
    let text = text.trim_end();
    let sha256 = hex(&Sha256::digest(text));
    let known = KNOWN.iter().find(|known| known.sha256 == sha256)?;
    Some((known.family, known.edits.iter().fold(text.to_owned(), |text, edit| edit.apply(&text))))
}

impl Edit {
    fn apply(&self, text: &str) -> String {
        let (mut edited, mut rest) = (String::with_capacity(text.len()), text);
        while let Some(start) = rest.find(self.from) {
            let behind = &rest[start + self.from.len()..];
            let Some(end) = behind.find(self.to) else { break };
            edited.push_str(&rest[..start]);
            edited.push_str(self.with);
            rest = &behind[end + self.to.len()..];
        }
        edited + rest
    }
}
