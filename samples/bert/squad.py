"""Questions as inputs of BERT: [CLS] question [SEP] context [SEP], with start and end of the answer."""

import json

import torch
from torch.utils.data import Dataset
from transformers import BertConfig

PAD, CLS, SEP = 0, 101, 102
SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


DEFAULTS = {
    "tiny": {"steps": 40, "batch_size": 16, "lr": 1e-3},
    "large": {"steps": 6, "batch_size": 4, "lr": 3e-5},
}


def make_config(size, vocabulary=None):
    """BERT of a size; the tiny one has a vocabulary to match."""
    words = vocabulary or (30522 if size == "large" else 400)
    return BertConfig(vocab_size=words, max_position_embeddings=512, **SIZES[size])


class Synthetic(Dataset):
    """The answer stands after the word that the question asks for; only answers have words of the last tenth."""

    def __init__(self, count, length, vocabulary, seed=0):
        self.count, self.length, self.vocabulary, self.seed = count, length, vocabulary, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(1_000_003 * self.seed + index)
        low = min(200, self.vocabulary // 2)
        subject = torch.randint(low, self.vocabulary // 10 * 9, (1,), generator=chance).item()
        span = torch.randint(1, 4, (1,), generator=chance).item()
        names = self.vocabulary - self.vocabulary // 10
        context = torch.randint(low, names, (self.length - 5,), generator=chance)
        at = torch.randint(0, len(context) - span - 1, (1,), generator=chance).item()
        context[at] = subject
        context[at + 1 : at + 1 + span] = torch.randint(names, self.vocabulary, (span,), generator=chance)
        ids = torch.cat([torch.tensor([CLS, subject, 10 + span, SEP]), context, torch.tensor([SEP])])
        kinds = torch.ones(self.length, dtype=torch.long)
        kinds[:4] = 0
        start = 4 + at + 1
        return {
            "input_ids": ids,
            "attention_mask": torch.ones(self.length, dtype=torch.long),
            "token_type_ids": kinds,
            "start_positions": torch.tensor(start),
            "end_positions": torch.tensor(start + span - 1),
        }


class Squad(Dataset):
    """SQuAD 1.1 from its JSON file, tokenized with a WordPiece vocabulary on this disk."""

    def __init__(self, path, vocabulary, length, count=None):
        from transformers import BertTokenizerFast

        self.tokenizer, self.length = BertTokenizerFast(str(vocabulary)), length
        with open(path, encoding="utf-8") as file:
            articles = json.load(file)["data"]
        self.entries = [
            (question["question"], paragraph["context"], question["answers"][0])
            for article in articles
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
            if question["answers"]
        ][:count]

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, index):
        question, context, answer = self.entries[index]
        made = self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=self.length,
            padding="max_length",
            return_tensors="pt",
        )
        first = made.char_to_token(answer["answer_start"], sequence_index=1)
        last = made.char_to_token(answer["answer_start"] + len(answer["text"]) - 1, sequence_index=1)
        entry = {name: tensor[0] for name, tensor in made.items()}
        found = first is not None and last is not None
        entry["start_positions"] = torch.tensor(first if found else 0)
        entry["end_positions"] = torch.tensor(last if found else 0)
        return entry


def add_arguments(parser):
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, help="by default 6 for the large one, 40 for the tiny one")
    parser.add_argument("--batch-size", type=int, help="by default 4 and 16")
    parser.add_argument("--length", type=int, default=64, help="tokens of question and context")
    parser.add_argument("--lr", type=float, help="by default 3e-5 and 1e-3")
    parser.add_argument("--data", help="train-v1.1.json of SQuAD; without it, questions are made up")
    parser.add_argument("--vocab", help="vocab.txt of a WordPiece tokenizer, for --data")
    parser.add_argument("--seed", type=int, default=0)


def parse(parser):
    """The arguments, with what the size of the model decides."""
    args = parser.parse_args()
    for name, value in DEFAULTS[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def make_data(args, config):
    count = args.steps * args.batch_size
    if args.data:
        return Squad(args.data, args.vocab, args.length, count)
    return Synthetic(count, args.length, config.vocab_size, args.seed)
