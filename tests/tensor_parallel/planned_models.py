"""Tiny transformers of the kinds that the planner must handle, and their captured graphs."""

import functools

import torch

from gemini.capture.entry import capture
from gemini.capture.options import CaptureOptions

VOCABULARY, HIDDEN, BATCH, LENGTH = 512, 64, 4, 16
NAMES = ("gpt2", "llama", "bert", "t5", "mixtral")
ACTIVATION = BATCH * LENGTH * HIDDEN  # elements of the residual stream


@functools.cache
def transformer(name, layers=2, drop=0.0):
    """Return a model and the arguments of a call with labels."""
    torch.manual_seed(0)
    ids, labels = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))
    call = {"input_ids": ids, "labels": labels}
    if name == "bert":
        call["attention_mask"] = torch.ones_like(ids)
    return _model(name, layers, drop).train(), call


def _model(name, layers, drop):
    import transformers as hf

    if name == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=HIDDEN, n_layer=layers, n_head=4, use_cache=False,
            resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, bos_token_id=0, eos_token_id=0))  # fmt: skip
    llama = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "use_cache": False, "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=128, **llama))
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(intermediate_size=96, num_local_experts=4, **llama))
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=64, hidden_dropout_prob=drop,
            attention_probs_dropout_prob=drop))  # fmt: skip
    return hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=16, d_ff=128, num_layers=layers, num_heads=4, dropout_rate=drop,
        use_cache=False, decoder_start_token_id=0))  # fmt: skip


@functools.cache
def transformer_graph(name, layers=2, drop=0.0):
    """Return the graph of a transformer; in float64, but for Mixtral, whose products are of float32."""
    model, call = transformer(name, layers, drop)
    model = model if name == "mixtral" else model.double()
    return opened(model, **call)


def opened(model, *args, **kwargs):
    """Capture a model with leaf modules opened that are no layers of torch.nn."""
    return capture(model, args, kwargs, options=CaptureOptions(opens_leaves=True))
