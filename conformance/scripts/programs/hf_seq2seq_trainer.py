"""Seq2SeqTrainer: a small T5 learns to copy; generation during evaluation."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)


class Copy(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.source = torch.randint(3, 30, (count, 6), generator=generator)

    def __len__(self):
        return len(self.source)

    def __getitem__(self, i):
        return {
            "input_ids": self.source[i],
            "attention_mask": torch.ones(6, dtype=torch.long),
            "labels": self.source[i],
        }


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "eval_loss", "eval_match"):
            if name in logs:
                print(f"{name} at {state.global_step}: {logs[name]:.5f}")


def compute_metrics(prediction):
    made, wanted = prediction.predictions[:, 1:], prediction.label_ids
    width = min(made.shape[1], wanted.shape[1])
    return {"match": float(np.mean(made[:, :width] == wanted[:, :width]))}


set_seed(3)
config = T5Config(
    vocab_size=30, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.1
)
model = T5ForConditionalGeneration(config)
model.generation_config.max_length = 8
args = Seq2SeqTrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_train_epochs=1,
    learning_rate=5e-3,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    predict_with_generate=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=Copy(64, 0),
    eval_dataset=Copy(8, 1),
    compute_metrics=compute_metrics,
    callbacks=[Report()],
)
trainer.remove_callback(PrinterCallback)
trainer.train()
torch.save(model.state_dict(), "checkpoint.pt")
