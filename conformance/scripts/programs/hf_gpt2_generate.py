"""GPT-2 from the library: causal language modelling with labels, generate() in evaluation, save_pretrained."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=39)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(12):
    model.train()
    ids = (torch.randint(0, 39, (8, 1)) + torch.arange(16)) % 39
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.5f}")
    if step % 5 == 4:
        model.eval()
        prompt = torch.tensor([[1, 2, 3, 4]])
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, pad_token_id=39
        )
        print("generated", made[0].tolist())
model.save_pretrained("saved", safe_serialization=True)
again = GPT2LMHeadModel.from_pretrained("saved")
with torch.no_grad():
    print(f"reloaded {again.eval()(input_ids=ids, labels=ids).loss.item():.5f}")
torch.save(model.state_dict(), "checkpoint.pt")
