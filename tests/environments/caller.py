"""A model whose next token depends on the last one alone, with a chat template that knows tools: it calls a calculator.

It is a real transformer with real gradients: attention and MLP add nothing, and the output layer holds the table.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # pyright: ignore

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 * 3"}}\n</tool_call>'
RIGHT, WRONG = "So it is #### 6", "So it is #### 7"
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- if tools -%}{{ '" + START + "system\nTools:' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}"
    "{%- endfor -%}{{ '" + END + "\n' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '" + START + "' + m.role + '\n' + m.content + '" + END + "\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + START + "assistant\n' }}{%- endif -%}"
)


def save_caller(folder: Path, call: float = 1.0, right: float = 0.5, wrong: float = 0.5) -> Path:
    """After a turn's opening it calls the calculator, or gives the right or the wrong answer, with these logits."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (CALL, RIGHT, WRONG)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    size = 320
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=5,
            num_key_value_heads=1, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in (CALL, RIGHT, WRONG, END)}
    table = torch.full((size, size), -20.0)
    newline = tokenizer.encode("\n")[0]
    for text, logit in ((CALL, call), (RIGHT, right), (WRONG, wrong)):
        table[newline, ids[text]] = logit
        table[ids[text], ids[END]] = 10.0
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(table.T / size**0.5)  # the norm before it makes sqrt(size) of a 1
    model.save_pretrained(folder)
    return folder
