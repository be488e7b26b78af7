"""What Hugging Face's Llama computes.

Usage: llama_reference.py RESULT FOLDER. Opens the models in the folders below FOLDER, and saves tokens, logits, loss and gradients of each by its
name. Makes small random models there first if there is no FOLDER. Saves None if there is no transformers.
"""

import os
import sys

import torch

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}
# Of so short an original context that some rotations are slowed down, some are not, and some a little.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "sizes": {
        "num_key_value_heads": 4, "head_dim": 24, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
TOKENS = (torch.arange(48) * 7919 % 256).view(2, 24)


def make(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, case in CASES.items():
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **case}))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:  # not zeros and ones, which hide mistakes
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        # Several files.
        model.save_pretrained(os.path.join(folder, name), max_shard_size="100KB")


def computed_in(folder):
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(found.values()), f"{folder}: {found}"
    result = model(TOKENS, labels=TOKENS)
    result.loss.backward()
    return {
        "tokens": TOKENS,
        "logits": result.logits.detach(),
        "loss": result.loss.detach(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def main():
    result, folder = sys.argv[1:]
    try:
        import transformers
    except ImportError:
        torch.save(None, result)
        return
    transformers.logging.disable_progress_bar()
    if not os.path.exists(folder):
        make(folder)
    torch.save({name: computed_in(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}, result)


main()
