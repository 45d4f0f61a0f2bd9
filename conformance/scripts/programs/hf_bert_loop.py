"""BERT question answering in a plain loop, with warm-up and decay of the learning rate."""

import torch
from transformers import BertConfig, BertForQuestionAnswering, get_linear_schedule_with_warmup

torch.manual_seed(0)
config = BertConfig(
    vocab_size=120,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
)
model = BertForQuestionAnswering(config)
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-8)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
model.train()
for step in range(12):
    ids = torch.randint(5, 120, (8, 24))
    mask = (torch.arange(24) < torch.randint(16, 25, (8, 1))).long()
    starts = torch.randint(6, 12, (8,))
    ends = starts + torch.randint(0, 4, (8,))
    for row, (start, end) in enumerate(zip(starts, ends)):
        ids[row, start], ids[row, end] = 3, 4
    outputs = model(input_ids=ids, attention_mask=mask, start_positions=starts, end_positions=ends)
    loss = outputs.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    print(f"step {step} loss {loss.item():.6f} lr {scheduler.get_last_lr()[0]:.2e}")
model.eval()
with torch.no_grad():
    outputs = model(input_ids=ids, attention_mask=mask)
print(f"spans {outputs.start_logits.argmax(-1).tolist()} {outputs.end_logits.argmax(-1).tolist()}")
torch.save(model.state_dict(), "checkpoint.pt")
