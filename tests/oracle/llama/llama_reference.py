"""Saves what Hugging Face's Llama computes: configuration, weights, tokens, logits, loss and gradients of small random models.

Usage: llama_reference.py RESULT. Saves None if there is no transformers.
"""

import sys

import torch

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}
# Of so short an original context that within 24 positions some rotations are slowed down, some not, and some a little.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "other sizes": {
        "num_key_value_heads": 4, "head_dim": 24, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


def run(config):
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # not zeros and ones, which hide mistakes
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    tokens = torch.randint(config.vocab_size, (2, 24))
    result = model(tokens, labels=tokens)
    result.loss.backward()
    return {
        "config": config.to_json_string(use_diff=False),
        "weights": {name: parameter.data for name, parameter in model.named_parameters()},
        "tokens": tokens,
        "logits": result.logits.detach(),
        "loss": result.loss.detach(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def main():
    try:
        from transformers import LlamaConfig
    except ImportError:
        torch.save(None, sys.argv[1])
        return
    torch.save({name: run(LlamaConfig(**{**SMALL, **case})) for name, case in CASES.items()}, sys.argv[1])


main()
