"""A small model that is planned, and words that change its recipe."""

RECIPE = """\
run: {dir: run, steps: 50, device: cpu}
model:
  architecture:
    {model_type: qwen3, vocab_size: 1031, hidden_size: 96, intermediate_size: 224,
     num_hidden_layers: 4, num_attention_heads: 6, num_key_value_heads: 2, head_dim: 16,
     tie_word_embeddings: false}
data: {sources: [{path: nowhere}], seq_len: 128}
batch: {global_batch: 8, micro_batch: 2}
optimizer: {lr: 3e-3}
"""
# A large block and few tokens: the peak is in the blocks or in the update, not at the loss.
BLOCKS = (
    "model.architecture.vocab_size=67 model.architecture.intermediate_size=1024 "
    "model.architecture.num_hidden_layers=3 data.seq_len=64 data.document_mask=false"
)
# Hardly a token: the peak is where a block's gradients are reduced.
TP, PP, EVEN = "strategy.tp=2", "strategy.pp=2", "model.architecture.vocab_size=1032"
EP = "strategy.ep=2 model.architecture.model_type=qwen3_moe " + " ".join(
    f"model.architecture.options.{key}={value}"
    for key, value in {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"norm_topk_prob": "true", "router_bias_update_rate": 0.001},
    }.items()
)
