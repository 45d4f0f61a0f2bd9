"""Inputs by name: what the library calls an argument says what to put there, whatever the architecture.

`make(name, about)` gives candidates, the likeliest first. `About` holds the configuration, the batch size and the
arguments already made, so that a mask fits the values it masks and a grid fits the patches it describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

LENGTH = 12
GRID = (1, 4, 4)  # frames, rows and columns of patches of one picture, for models that take patches


@dataclass
class About:
    """What is known when an input is made."""

    config: Any
    batch: int
    given: dict[str, Any] = field(default_factory=dict)

    def holders(self) -> Iterator[Any]:
        """The configuration and all configurations in it, outermost first."""
        waiting, seen = [self.config], set()
        while waiting:
            one = waiting.pop(0)
            if id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            waiting += [v for v in vars(one).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first value that is set under one of the names, here or in a sub-configuration."""
        for name in names:
            for holder in self.holders():
                value = getattr(holder, name, None)
                if value is not None:
                    return value
        return default

    def number(self, *names: str, default: int = 0) -> int:
        value = self.get(*names, default=default)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        return int(value) if isinstance(value, (int, float)) else default


Maker = Callable[[About], Iterator[Any]]


def tokens(about: About, length: int = LENGTH) -> torch.Tensor:
    """Token ids that are no special tokens."""
    vocabulary = about.number("vocab_size", default=100)
    special = {
        value
        for holder in about.holders()
        for name, value in vars(holder).items()
        if name.endswith(("token_id", "token_index", "_id")) and isinstance(value, int)
    }
    allowed = [token for token in range(min(vocabulary, 200)) if token not in special] or [0]
    picks = torch.randint(0, len(allowed), (about.batch, length))
    return torch.tensor(allowed)[picks]


def picture(about: About, size: int | None = None) -> torch.Tensor:
    """A batch of pictures, of the size the configuration names unless told."""
    found = size or about.get("image_size", "img_size", "input_size") or 64
    height, width = (found[0], found[-1]) if isinstance(found, (list, tuple)) else (found, found)
    return torch.randn(about.batch, about.number("num_channels", "in_channels", "in_chans", default=3), height, width)


def _pictures(about: About) -> Iterator[Any]:
    frames = about.number("num_frames", "frames_per_clip")
    if frames:
        yield torch.randn(about.batch, frames, *picture(about).shape[1:])
    yield picture(about)
    yield torch.stack([picture(about), picture(about)], dim=1)  # pairs of pictures
    for size in (64, 128):
        yield picture(about, size)
    yield from patches(about)
    yield picture(about, 224)


def patches(about: About) -> Iterator[Any]:
    """Pictures as rows of flattened patches, all pictures together, then one row of them a picture."""
    channels = about.number("in_channels", "in_chans", "num_channels", default=3)
    size = about.number("patch_size", default=8)
    frames = about.number("temporal_patch_size", default=1)
    count = about.batch * GRID[0] * GRID[1] * GRID[2]
    for width in dict.fromkeys((channels * frames * size * size, channels * size * size)):
        yield torch.randn(count, width)
        yield torch.randn(about.batch, count // about.batch, width)
    yield torch.randn(count, channels, size, size)


def _videos(about: About) -> Iterator[Any]:
    frames = about.number("num_frames", "frames_per_clip", default=4)
    yield torch.randn(about.batch, frames, *picture(about).shape[1:])
    yield from patches(about)


def _sound(about: About) -> Iterator[Any]:
    yield torch.randn(about.batch, 4000)
    yield torch.randn(about.batch, 1, 4000)
    yield torch.randn(about.batch, about.number("max_length", default=64), about.number("num_mel_bins", default=16))
    yield torch.randn(about.batch, 1, 1920 * 2)
    yield torch.randn(about.batch, 1920 * 2)
    yield torch.randn(about.batch, 16000)


def _spectra(about: About) -> Iterator[Any]:
    bins = about.number(
        "num_mel_bins", "feature_size", "input_feat_size", "input_feat_per_channel", "n_mels", "input_dim", default=80
    )
    positions = about.number("max_source_positions", default=32)
    for length in dict.fromkeys((2 * positions, positions, 64, 256)):
        yield torch.randn(about.batch, bins, length)
        yield torch.randn(about.batch, length, bins)
        yield torch.randn(about.batch, 1, length, bins)
    for width in (about.number("feature_projection_input_dim", default=160), 80, 128, 160):
        yield torch.randn(about.batch, 64, width)
        yield torch.randn(about.batch, width, 64)


def _embeddings(*names: str) -> Maker:
    def make(about: About) -> Iterator[Any]:
        width = about.number(*names, "hidden_size", "d_model", "n_embd", "embed_dim", default=32)
        yield torch.randn(about.batch, LENGTH, width)
        yield torch.randn(about.batch, width, LENGTH)

    return make


def _patches_or_embeddings(about: About) -> Iterator[Any]:
    yield from patches(about)
    yield from _embeddings()(about)


def _mask(*of: str) -> Maker:
    """Ones, shaped as the first of the named values that is given."""

    def make(about: About) -> Iterator[Any]:
        for name in (*of, "input_ids", "inputs_embeds", "input_features", "input_values", "hidden_states"):
            value = about.given.get(name)
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                for shape in dict.fromkeys(((*value.shape[:2],), (value.shape[0], value.shape[-1]))):
                    yield torch.ones(shape, dtype=torch.long)
                    yield torch.ones(shape, dtype=torch.bool)
                if value.dim() == 4:
                    yield torch.ones(value.shape[0], *value.shape[-2:], dtype=torch.long)
                    yield torch.ones(value.shape[0], *value.shape[-2:], dtype=torch.bool)
                yield torch.ones(value.shape, dtype=torch.bool)

    return make


def _grids(width: int) -> Maker:
    def make(about: About) -> Iterator[Any]:
        yield torch.tensor([GRID[-width:]] * about.batch)

    return make


def _ids(text: Callable[[About], Iterator[Any]]) -> Maker:
    return text


def _positions(about: About) -> Iterator[Any]:
    for value in about.given.values():
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            count = value.shape[1]
            yield torch.arange(count).expand(about.batch, count).clone()
            grid = torch.stack(torch.meshgrid(torch.arange(GRID[1]), torch.arange(GRID[2]), indexing="ij"), -1)
            yield grid.reshape(1, -1, 2).expand(about.batch, -1, 2).clone()
            yield torch.zeros(about.batch, count, 2, dtype=torch.long)


def _token_types(about: About) -> Iterator[Any]:
    like = about.given.get("input_ids")
    if like is not None:
        yield torch.zeros_like(like)


def _boxes(about: About) -> Iterator[Any]:
    like = about.given.get("input_ids")
    if like is not None:
        yield torch.zeros(*like.shape, 4, dtype=torch.long)
        yield torch.rand(*like.shape, 4)
        yield torch.rand(*like.shape, 8)


def _series(*names: str, flat: bool = True) -> Maker:
    def make(about: About) -> Iterator[Any]:
        lags = about.get("lags_sequence", default=[0])
        length = about.number("context_length", "prediction_length", default=32) + max(lags or [0])
        length = about.number("prediction_length", default=8) if "future" in names else length
        for channels in dict.fromkeys((about.number("num_input_channels", "input_size", default=1), 1)):
            yield torch.randn(about.batch, length, channels)
        yield torch.randn(about.batch, length)

    return make


def _time_features(part: str) -> Maker:
    def make(about: About) -> Iterator[Any]:
        like = about.given.get(f"{part}_values", about.given.get("past_values"))
        length = like.shape[1] if like is not None else LENGTH
        if part == "future":
            length = about.number("prediction_length", default=8)
        for width in dict.fromkeys((about.number("num_time_features", default=1), 1)):
            yield torch.randn(about.batch, length, width)

    return make


def _like(name: str, value: Callable[..., torch.Tensor] = torch.ones_like) -> Maker:
    def make(about: About) -> Iterator[Any]:
        if name in about.given:
            yield value(about.given[name])

    return make


def _sequence(*names: str, default: int = 1, whole: int = 0) -> Maker:
    """A sequence of vectors as wide as a field of the configuration says, or of whole numbers below `whole`."""

    def make(about: About) -> Iterator[Any]:
        width = about.number(*names, default=default)
        yield torch.randint(0, whole, (about.batch, LENGTH)) if whole else torch.randn(about.batch, LENGTH, width)
        if not whole:
            yield torch.randn(about.batch, width)

    return make


def _codes(about: About) -> Iterator[Any]:
    books = about.number("num_codebooks", "num_quantizers", "n_codebooks", default=4)
    size = max(2, min(16, about.number("codebook_size", "vocab_size", default=16)))
    yield torch.randint(0, size, (about.batch, books, LENGTH))
    yield torch.randint(0, size, (about.batch, LENGTH, books))
    yield torch.randint(0, size, (about.batch, LENGTH))


def _sizes(about: About) -> Iterator[Any]:
    value = about.given.get("pixel_values")
    if value is not None:
        yield torch.tensor([tuple(value.shape[-2:])] * about.batch)


def _points(about: About) -> Iterator[Any]:
    yield torch.rand(about.batch, 1, 2, 2) * 16


def _regions(about: About) -> Iterator[Any]:
    yield torch.randn(about.batch, 6, about.number("visual_feat_dim", "visual_embedding_dim", default=32))


def _region_positions(about: About) -> Iterator[Any]:
    yield torch.rand(about.batch, 6, about.number("visual_pos_dim", default=4))


def _tokens(length: int = LENGTH) -> Maker:
    def make(about: About) -> Iterator[Any]:
        yield tokens(about, length)

    return make


def _constant(value: Any) -> Maker:
    def make(about: About) -> Iterator[Any]:
        yield value

    return make


_MAKERS: tuple[tuple[str, Maker], ...] = (
    (r"^decoder_input_ids$", _tokens(8)),
    (r"input_ids$", _tokens()),
    (r"^task_inputs$", lambda about: iter([torch.randn(about.batch, about.number("task_seq_len", default=LENGTH))])),
    (r"^(pixel_values|image|pixel_values_images)$", _pictures),
    (r"^prompt_pixel_values$", _like("pixel_values", torch.randn_like)),
    (r"^prompt_masks$", _like("pixel_values", torch.rand_like)),
    (r"^(pixel_values_videos|video|pixel_values_video)$", _videos),
    (r"^(input_values|audio_values|input_audio)$", _sound),
    (r"^(input_features|audio_mel|mel_spectrogram|input_spectrogram|spectrogram|audio_features)$", _spectra),
    (r"(grid_thw|grid_thws)$", _grids(3)),
    (r"(grid_hw|spatial_shapes|tgt_sizes|target_sizes|grid_hws)$", _grids(2)),
    (r"^merge_sizes?$", lambda about: iter([torch.ones(about.batch, dtype=torch.long)])),
    (r"^image_sizes$", _sizes),
    (r"^image_attention_mask$", lambda about: iter([torch.ones(about.batch, LENGTH, 2, dtype=torch.long)])),
    (r"^(pixel_mask|pixel_attention_mask|image_mask|patch_attention_mask)$", _mask("pixel_values")),
    (r"^(encoder_attention_mask)$", _mask("encoder_hidden_states")),
    (r"^decoder_attention_mask$", _mask("decoder_input_ids")),
    (r"^(input_features_mask|feature_attention_mask|audio_mel_mask|audio_mask|padding_mask)$",
     _mask("input_features", "audio_mel", "input_values")),
    (r"attention_mask$", _mask()),
    (r"position_ids$", _positions),
    (r"(token_type_ids|langs|segment_ids)$", _token_types),
    (r"^bbox$", _boxes),
    (r"^(past_values|future_values)$", _series()),
    (r"^past_time_features$", _time_features("past")),
    (r"^future_time_features$", _time_features("future")),
    (r"^(past_observed_mask|observed_mask)$", _like("past_values")),
    (r"^static_categorical_features$", lambda about: iter([torch.zeros(about.batch, 1, dtype=torch.long)])),
    (r"^state$", lambda about: iter([torch.randn(about.batch, about.number("max_state_dim", "state_dim", default=8))])),
    (r"^flattened_patches$", lambda about: iter([torch.rand(about.batch, GRID[1] * GRID[2], 2 + 3 * 16 * 16)])),
    (r"^states$", _sequence("state_dim", "max_state_dim", default=17)),
    (r"^actions?$", _sequence("act_dim", "action_dim", "max_action_dim", default=4)),
    (r"^(rewards|returns_to_go)$", _sequence()),
    (r"^(timesteps?|frame_idx)$", _sequence(whole=8)),
    (r"^query_embeds$", _embeddings()),
    (r"^encoder_hidden_states$", _embeddings("encoder_hidden_size")),
    (r"^hidden_states$", _patches_or_embeddings),
    (r"^(inputs_embeds|decoder_inputs_embeds|encoder_inputs_embeds|input_embeds|noise)$", _embeddings()),
    (r"codes$", _codes),
    (r"^input_points$", _points),
    (r"^visual_(feats|embeds)$", _regions),
    (r"^visual_pos$", _region_positions),
    (r"^return_loss$", _constant(True)),
    (r"^input$", lambda about: iter([picture(about, 64), torch.randn(about.batch, LENGTH, 32)])),
    (r"^is_longer$", lambda about: iter([torch.zeros(about.batch, 1, dtype=torch.bool)])),
)  # fmt: skip


def make(name: str, about: About) -> Iterator[Any]:
    """Candidates for an argument, by its name; none if the name says nothing."""
    for pattern, maker in _MAKERS:
        if re.search(pattern, name):
            yield from maker(about)
            return
