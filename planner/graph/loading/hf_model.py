"""A Hugging Face ``config.json`` as a model file: the model that it describes, and its data.

The file offers what every model file offers, ``build_model`` and ``example_batch``, for the
``config.json`` that lies beside it. It needs torch and transformers only. The planner traces
models through it and copies it, as ``model.py``, beside the training script: what is traced is
what the script trains. Weights and data are random, of the right shapes and ranges, so that
nothing is downloaded; add a ``data_loader`` to train on your own data. The model computes
its own loss from the labels that it is given.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

CONFIG_FILE = Path(__file__).with_name("config.json")
"""The config that ``build_model`` and ``example_batch`` are about."""

LONGEST_DEFAULT = 2048
"""Tokens per sample where none are asked for and the model takes more."""

IMAGE_SIZE = 224
"""Pixels per side of an image where the config has no image_size."""

AUDIO_SAMPLES = 160_000
"""Samples of a waveform: 10 s at 16 kHz."""

AUDIO_FRAMES = 1000
"""Frames of a spectrogram: 10 s at 100 frames a second."""

AUDIO_BINS = 80
"""Height of a spectrogram where the config has none."""

TRANSCRIPT_TOKENS = 64
"""Labels of a sound that is aligned with its text (CTC)."""

Config: TypeAlias = Any
"""A config of transformers, or what one of its fields holds."""

Inputs: TypeAlias = dict[str, Tensor]
"""Keyword arguments of the model's forward."""

_MEDIA = (
    *("pixel_", "image", "video", "audio", "speech", "input_features", "input_values"),
    "cross_attention_states",
)
"""How arguments for images and sound begin."""


class ConfigError(ValueError):
    """The config describes no model that there are example data for."""

    def __init__(self, message: str, *, hint: str) -> None:
        """Keep what is wrong, and (``hint``) what would work."""
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Task:
    """What a model is trained for."""

    name: str
    """As in transformers' tables of models: ``MODEL_FOR_<name>_MAPPING``."""
    auto_name: str
    """As in the class that builds the models of the table: ``AutoModelFor<auto_name>``."""
    sample: str
    """What a sample consists of; text has a length that can be chosen."""
    make_batch: Callable[[Config, str, int, int], Inputs]
    """Makes a batch of (config, main input, samples, tokens per sample)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredModel:
    """The model that a config describes."""

    file: Path
    """The config."""
    task: Task
    """What it is trained for."""
    class_name: str
    """Class that is built."""
    main_input: str
    """Name of the argument that takes a sample."""
    config: Config
    """The config, or the part of it that the class takes."""
    most_positions: int | None
    """Tokens that its table of positions is for, None where it has no table."""
    note: str
    """Why it is another class than the config names, "" where it is not."""

    def build(self) -> nn.Module:
        """Build the model in train mode, its weights in torch's default dtype."""
        return _build(self.file, self.task)

    def example_batch(
        self, microbatch_size: int, seq_len: int | None = None
    ) -> tuple[Inputs, None]:
        """Make random samples under torch's current seed; see ``example_batch`` of this file."""
        length = seq_len or self.default_seq_len
        return self.task.make_batch(self.config, self.main_input, microbatch_size, length), None

    @property
    def takes_text(self) -> bool:
        """Whether samples have a number of tokens that can be chosen."""
        return "text" in self.task.sample

    @property
    def default_seq_len(self) -> int:
        """Tokens per sample where none are asked for: the most the model takes, at most 2048.

        It is a multiple of 8, since kernels are slower on other sizes.
        """
        names = ("max_position_embeddings", "n_positions", "max_seq_len")
        text = self.config.get_text_config()
        if getattr(text, "axial_pos_embds", False):  # positions of a grid, all of which are used
            return math.prod(text.axial_pos_shape)
        named = _field(text, names)
        limits = [limit for limit in (named, self.most_positions) if limit and limit > 0]
        length = int(min((*limits, LONGEST_DEFAULT)))
        return length - length % 8 if length > 8 else length


def build_model() -> nn.Module:
    """Build the model of the config beside this file."""
    return _beside().build()


def example_batch(microbatch_size: int, seq_len: int | None = None) -> tuple[Inputs, None]:
    """Make its keyword arguments; there are no targets, since it computes its loss itself."""
    return _beside().example_batch(microbatch_size, seq_len)


@cache
def _beside() -> ConfiguredModel:
    return configured_model(CONFIG_FILE)


# The config and its model ------------------------------------------------------------------------


def configured_model(file: Path) -> ConfiguredModel:
    """Read a config, choose the class to build, and see on the meta device what it takes.

    Raises:
        ConfigError: It describes nothing that there are example data for.
    """
    model_class, task, note = _choose(_read(file))
    arguments = inspect.signature(model_class.forward).parameters
    media = [name for name in arguments if name.startswith(_MEDIA)]
    if model_class.main_input_name == "input_ids" and (media or "sound" in task.sample):
        raise ConfigError(
            f"{model_class.__name__} takes {', '.join(media) or 'sound'} beside tokens, and "
            "models of several media are not built from their config",
            hint=f"Write a model file: build_model() returns {model_class.__name__}(config), "
            "example_batch(microbatch_size) returns its keyword arguments and None.",
        )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = _build(file, task)
    return ConfiguredModel(
        file=file,
        task=task,
        class_name=model_class.__name__,
        main_input=model_class.main_input_name,
        config=model.config,
        most_positions=_most_positions(model, task),
        note=note,
    )


def _read(file: Path) -> Config:
    """Read a config of a type that transformers has; no code is downloaded."""
    return transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)


def _choose(config: Config) -> tuple[Any, Task, str]:
    """Choose the class: the one that the config names, else the first for its type."""
    offered = [(each, task) for task in TASKS for each in _classes(f"FOR_{task.name}_", config)]
    names = list(config.architectures or ())
    for model_class, task in offered:
        if model_class.__name__ in names:
            return model_class, task, ""
    headless = {each.__name__ for each in _classes("", config)}
    if not offered or not headless.issuperset(names):
        named = " or ".join(names) or f"a model of type {config.model_type!r}"
        known = ", ".join(dict.fromkeys(each.__name__ for each, _ in offered)) or "none"
        raise ConfigError(
            f"it describes {named}, for which there are no example data; of its type there are "
            f"for: {known}",
            hint='Name one of these as "architectures", or write a model file.',
        )
    model_class, task = offered[0]
    reason = f"{names[0]} has no loss" if names else "it names no class"
    return model_class, task, f"{reason}, so that {model_class.__name__} is trained"


def _classes(table: str, config: Config) -> tuple[Any, ...]:
    """Return the classes for a config in one of transformers' tables."""
    found = getattr(modeling_auto, f"MODEL_{table}MAPPING").get(type(config), ())
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _build(file: Path, task: Task) -> nn.Module:
    """Build the model of a config.

    transformers itself chooses fused attention (sdpa) and fused experts (grouped_mm) where the
    model has them. The dtype that the config names is that of a checkpoint.
    """
    config = _read(file)  # once more, since building writes into it
    for part in _parts(config):
        if getattr(part, "use_cache", False):
            part.use_cache = False
    auto_class = getattr(transformers, f"AutoModelFor{task.auto_name}")
    model: nn.Module = auto_class.from_config(
        config, dtype=torch.get_default_dtype(), trust_remote_code=False
    )
    return model.train()


def _parts(config: Config) -> list[Config]:
    """Return a config and the configs in it."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for part in parts if part is not None)]


def _most_positions(model: nn.Module, task: Task) -> int | None:
    """Count the positions in the smallest of a model's tables of them for text."""
    rows = [
        table.num_embeddings - _first_row(table)
        for path, table in model.named_modules()
        if isinstance(table, nn.Embedding)
        and _is_position_table(path)
        and not ("sound" in task.sample and "encoder" in path.split("."))
    ]
    return min(rows, default=None)


def _is_position_table(path: str) -> bool:
    name = path.rpartition(".")[2]
    return name == "wpe" or ("position" in name and "relative" not in name)


def _first_row(table: nn.Embedding) -> int:
    """Return the row of the first position: BART has an offset, RoBERTa follows its padding."""
    if isinstance(offset := getattr(table, "offset", None), int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


# Batches -----------------------------------------------------------------------------------------


def _language(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    """Tokens as labels of themselves; the model shifts them where it predicts the next one."""
    text = _text(config, name, size, seq_len)
    return {**text, "labels": text[name].clone()}


def _translation(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    source = _field(_side(config, "encoder"), ("src_vocab_size", "vocab_size"))
    return {name: _tokens(source, size, seq_len), **_decoder(config, size, seq_len)}


def _transcription(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    return {**_sound(config, name, size), **_decoder(config, size, seq_len)}


def _decoder(config: Config, size: int, seq_len: int) -> Inputs:
    """Inputs and labels of a decoder; not every config says how to make one of the other."""
    names = ("tgt_vocab_size", "decoder_vocab_size", "vocab_size")
    tokens = _tokens(_field(_side(config, "decoder"), names), size, seq_len + 1)
    return {"decoder_input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


def _images(config: Config, name: str, size: int, _: int) -> Inputs:
    labels = _class_labels(config, size)
    if name == "input_ids":  # a model that reads pixels as tokens
        return {name: _tokens(config.vocab_size, size, config.n_positions), "labels": labels}
    channels = _field(config, ("num_channels", "in_channels"), 3)
    if config.model_type.startswith("siglip2"):
        return {**_patches(config, name, size, channels), "labels": labels}
    side = _field(config, ("image_size",), IMAGE_SIZE)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return {name: torch.randn(size, channels, height, width), "labels": labels}


def _patches(config: Config, name: str, size: int, channels: int) -> Inputs:
    """Square images that are already cut into patches."""
    count, side = _field(config, ("num_patches",)), _field(config, ("patch_size",))
    return {
        name: torch.randn(size, count, channels * side * side),
        "pixel_attention_mask": torch.ones(size, count, dtype=torch.long),
        "spatial_shapes": torch.full((size, 2), round(count**0.5)),
    }


def _alignment(config: Config, name: str, size: int, _: int) -> Inputs:
    labels = _tokens(config.vocab_size, size, TRANSCRIPT_TOKENS)
    return {**_sound(config, name, size), "labels": labels}


def _sound_classes(config: Config, name: str, size: int, _: int) -> Inputs:
    return {**_sound(config, name, size), "labels": _class_labels(config, size)}


def _sound(config: Config, name: str, size: int) -> Inputs:
    """Waveforms, or spectrograms of the size that the config demands."""
    if config.model_type == "whisper":
        return {name: torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)}
    if config.model_type == "audio-spectrogram-transformer":
        return {name: torch.randn(size, config.max_length, config.num_mel_bins)}
    if name in ("input_values", "inputs"):
        return {name: torch.randn(size, AUDIO_SAMPLES)}
    names = ("input_dim", "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
    bins = _field(config, names, AUDIO_BINS) * getattr(config, "input_channels", 1)
    if config.model_type.startswith("granite_speech5"):  # with differences, two frames in one
        bins *= 4
    mask = torch.ones(size, AUDIO_FRAMES, dtype=torch.long)
    return {name: torch.randn(size, AUDIO_FRAMES, bins), "attention_mask": mask}


def _text_classes(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    return {**_text(config, name, size, seq_len), "labels": _class_labels(config, size)}


def _token_classes(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    labels = _tokens(config.num_labels, size, seq_len)
    return {**_text(config, name, size, seq_len), "labels": labels}


def _answers(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    first, last = torch.randint(0, seq_len, (2, size)).sort(0).values
    text = _text(config, name, size, seq_len)
    return {**text, "start_positions": first, "end_positions": last}


def _text(config: Config, name: str, size: int, seq_len: int) -> Inputs:
    tokens = {name: _tokens(config.get_text_config().vocab_size, size, seq_len)}
    if config.model_type == "xmod":  # one adapter for each language
        tokens["lang_ids"] = torch.zeros(size, dtype=torch.long)
    return tokens


def _tokens(vocab_size: int, size: int, seq_len: int) -> Tensor:
    return torch.randint(0, vocab_size, (size, seq_len))


def _class_labels(config: Config, size: int) -> Tensor:
    """One class per sample, or what the config's problem_type is about."""
    count = config.num_labels
    if config.problem_type == "multi_label_classification":
        return torch.randint(0, 2, (size, count)).float()
    if config.problem_type == "regression" or count == 1:
        return torch.randn(size, count).squeeze(-1)
    return torch.randint(0, count, (size,))


def _side(config: Config, side: str) -> Config:
    """Return the part of a config that is about its encoder or decoder, or the whole."""
    names = [name for name in (side, f"{side}_config") if name in config.sub_configs]
    return getattr(config, names[0]) if names else config


def _field(config: Config, names: tuple[str, ...], default: Config = None) -> Config:
    """Return the first of these fields that the config or one of its parts has."""
    for part in _parts(config):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return default


TASKS = (
    Task("SPEECH_SEQ_2_SEQ", "SpeechSeq2Seq", "sound and text", _transcription),
    Task("SEQ_TO_SEQ_CAUSAL_LM", "Seq2SeqLM", "text", _translation),
    Task("MASKED_LM", "MaskedLM", "text", _language),
    Task("CAUSAL_LM", "CausalLM", "text", _language),
    Task("IMAGE_CLASSIFICATION", "ImageClassification", "images", _images),
    Task("CTC", "CTC", "sound", _alignment),
    Task("AUDIO_CLASSIFICATION", "AudioClassification", "sound", _sound_classes),
    Task("SEQUENCE_CLASSIFICATION", "SequenceClassification", "text", _text_classes),
    Task("TOKEN_CLASSIFICATION", "TokenClassification", "text", _token_classes),
    Task("QUESTION_ANSWERING", "QuestionAnswering", "text", _answers),
)
"""What there are example data for; a config that names no class is met in this order."""
