"""The programs: which kind of script each stands for, how it is run, and whether its steps can be split at all."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "programs"
FLOAT32 = 1e-5  # deviations that are no fault, of a number's size: about 80 roundings of float32
BFLOAT16 = 2**-8  # two roundings: micro-batches round their weight gradients, and then add them up


@dataclass(frozen=True)
class Program:
    """One ordinary training script."""

    name: str
    kind: str
    why_whole: str = ""  # what makes its steps no sum over samples; "" where they are one
    arguments: tuple[str, ...] = ()
    stdin: str = ""
    code: int = 0
    needs: tuple[str, ...] = ()
    file: str = ""
    checkpoint: str = "checkpoint.pt"
    floor: float = FLOAT32
    chaotic: bool = False  # the least rounding grows: its first ten steps are held to the strict limit
    sampled: bool = False  # runs in `make tests`; the others in `make tests-all`

    @property
    def path(self) -> Path:
        """The script."""
        return FOLDER / (self.file or f"{self.name.partition('--')[0]}.py")

    @property
    def missing(self) -> list[str]:
        """Packages it needs that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


HF = ("transformers",)
TRAINER = ("transformers", "accelerate")
NORMED = "batch normalization couples samples"
CONTRAST = "the loss compares every sample with every other"
SINGLE = "one sample a step"
TINY = "nothing is trained"

PROGRAMS = (
    Program("plain_loop", "plain loop", sampled=True),
    Program("loops_in_functions", "loops in functions"),
    Program("trainer_class", "loops in a class"),
    Program("several_files", "several files", file="several_files/train.py", arguments=("--epochs", "2")),
    Program("hf_trainer", "Trainer: accumulation, clipping, metrics, label smoothing", needs=TRAINER),
    Program("hf_trainer_resume", "Trainer: checkpoint, resume, early stopping", needs=TRAINER),
    Program("hf_seq2seq_trainer", "Seq2SeqTrainer with generation", needs=TRAINER),
    Program("hf_bert_loop", "transformers in a plain loop", needs=HF),
    Program("hf_gpt2_generate", "generate() in evaluation, save_pretrained", needs=HF),
    Program("accelerate_loop", "accelerate loop", needs=("accelerate",)),
    Program("lightning_module", "PyTorch Lightning", needs=("lightning",)),
    Program("amp_grad_scaler", "autocast and GradScaler", floor=BFLOAT16),
    Program("amp_disabled_scaler", "autocast and GradScaler, disabled"),
    Program("bfloat16", "bfloat16 weights", floor=BFLOAT16),
    Program("gradient_checkpointing", "gradient checkpointing"),
    Program("grad_accumulation", "gradient accumulation and clipping"),
    Program("schedulers", "LR schedulers of all kinds"),
    Program("ema", "EMA of weights"),
    Program("swa", "SWA with update_bn", why_whole=NORMED),
    Program("several_optimizers", "several optimizers, sparse gradients"),
    Program("dcgan", "GAN with batch normalization", why_whole=NORMED, chaotic=True),
    Program("gan_mlp", "GAN, alternating steps", chaotic=True),
    Program("wgan_gp", "gradient penalty, double backward", why_whole="gradients of gradients", chaotic=True),
    Program("actor_critic", "actor–critic, one model", why_whole=SINGLE, chaotic=True),
    Program("a2c_two_networks", "actor–critic, two models", chaotic=True),
    Program("dqn", "reinforcement learning with a target network", chaotic=True),
    Program("reinforce", "reinforcement learning, policy gradient", chaotic=True),
    Program("siamese", "siamese network"),
    Program("triplet", "model called three times a step"),
    Program("simclr", "contrastive loss", why_whole=CONTRAST),
    Program("clip_pairs", "contrastive loss of two towers", why_whole=CONTRAST),
    Program("distillation", "distillation with a frozen teacher"),
    Program("lstm_lm", "LSTM language model, carried state, batch in dim 1"),
    Program("transformer_lm_time_first", "transformer, batch in dim 1"),
    Program("seq2seq_teacher_forcing", "seq2seq, teacher forcing in a Python loop"),
    Program("seq2seq_step_decoder", "seq2seq, a call a word"),
    Program("translation", "nn.Transformer with masks and ignore_index"),
    Program("vae", "VAE"),
    Program("resnet_batchnorm", "vision with BatchNorm", why_whole=NORMED),
    Program("vision_transformer", "vision transformer, mixup"),
    Program("super_resolution", "super-resolution"),
    Program("unet", "U-Net"),
    Program("gcn", "graph network on one graph", why_whole="one graph, all nodes see each other"),
    Program("graph_batches", "graph network on batches"),
    Program("lbfgs_sine", "LBFGS closure"),
    Program("closure_adam", "closure with an ordinary optimizer"),
    Program("compiled", "torch.compile"),
    Program("data_parallel", "nn.DataParallel"),
    Program("early_reads", "early loss.item(), NaN checks, predictions printed"),
    Program("gpt_generate", "GPT, loss in forward, generation in evaluation"),
    Program("best_model", "best model saved and loaded again"),
    Program("resume", "checkpoint and resume"),
    Program("lora", "adapters on a frozen base"),
    Program("from_config", "factory from a config file", file="from_config/main.py"),
    Program("cuda_guards", "CUDA_VISIBLE_DEVICES and .cuda() guarded"),
    Program("loader_workers", "DataLoader with worker processes"),
    Program("csv_logging", "logging to a CSV file"),
    Program("progress_bar", "progress bar, uneven last batch", needs=("tqdm",)),
    Program("argparse_help", "argparse", arguments=("data.csv", "-vn", "10", "--mode=slow")),
    Program("argparse_help--help", "argparse help", TINY, arguments=("--help",), checkpoint=""),
    Program("argparse_help--wrong", "argparse error", TINY, arguments=("--nope",), code=2, checkpoint=""),
    Program("asks_input", "input() from stdin", stdin="12\n0.1\nyes\nthe rest\n"),
    Program("raises_midway", "raises in the middle", code=1, sampled=True),
    Program("model_raises", "the model raises", code=1),
    Program("exits_with_code", "sys.exit(3)", code=3),
    Program("os_exit", "os._exit", code=5),
    Program("training_thread", "training in a thread"),
    Program("grows", "a layer is added while training"),
    Program("gradual_unfreezing", "layers are unfrozen while training"),
    Program("forks", "fork via multiprocessing"),
    Program("token_tagging", "packed sequences, class weights, ignore_index"),
    Program("masked_lm", "masked mean, tied weights"),
    Program("diffusion", "diffusion"),
    Program("adversarial_training", "gradients of inputs"),
    Program("style_of_image", "the input is trained, hooks", why_whole=SINGLE),
    Program("meta_learning", "functional_call, gradients through a step", why_whole="gradients of gradients"),
    Program("multitask", "several heads, learned loss weights"),
    Program("word2vec", "embeddings with negative sampling"),
    Program("char_rnn_names", "a letter at a time", why_whole=SINGLE),
    Program("matrix_factorization", "recommendations, penalty on weights"),
    Program("autoencoder_hooks", "forward and gradient hooks"),
    Program("speech_ctc", "CTC loss"),
    Program(
        "mixture_of_experts", "mixture of experts with a balance loss", why_whole="the balance loss couples samples"
    ),
    Program("own_optimizer", "own optimizer and autograd function"),
    Program("weight_drop_lstm", "dropout on weights, averaged SGD"),
    Program("old_style_lstm", "types compared, hidden states repackaged"),
    Program("architecture_search", "architecture weights that are no parameters", "workers know parameters only"),
    Program("kfac", "hooks on layers that make the step", "hooks run in the program's own process"),
    Program("momentum_contrast", "a queue, weights replaced in forward", "its forward replaces weights"),
    Program("gradnorm", "losses differentiated again after the step", "gradients of gradients"),
    Program("per_sample_gradients", "torch.func, then plain steps"),
    Program("scripted", "torch.jit", "it is compiled by torch.jit"),
    Program("changes_midway", "head, layers, dtype, forward changed while training"),
    Program("threads_train", "several models trained in threads"),
    Program("inference_only", "trains nothing", TINY),
)

BY_NAME = {program.name: program for program in PROGRAMS}
