"""A model and a tokenizer of a few kilobytes."""

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bass_jax.checkpoint.saved_tokenizer import import_transformers
from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.models import Model, param_shapes
from bass_jax.models.model_config import ModelConfig
from tests.checkpoint.slow_bpe import byte_names
from tests.flat_config import flat_config

VOCAB = 264


def small_config(**changes) -> ModelConfig:
    """Returns the configuration of a small Llama; `changes` are arguments of `flat_config`."""
    shape = {"width": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "mlp_width": 32}
    return flat_config(**({"vocab_size": VOCAB, "context": 128, "is_tied": True} | shape | changes))


def random_model(config: ModelConfig, seed: int = 0) -> Model:
    """Returns a model with random parameters. NumPy draws them, because compiling the initializer takes seconds."""
    draw = np.random.default_rng(seed)
    params = {
        name: jnp.asarray(0.3 * draw.standard_normal(leaf.shape), config.dtype)
        for name, leaf in param_shapes(config).items()
    }
    output_ids = None
    if config.output_vocab_size is not None:
        ids = draw.choice(config.vocab_size, config.output_vocab_size, replace=False)
        output_ids = jnp.asarray(ids, jnp.int32)
    return Model(unflatten_dict(params, sep="/"), config, output_ids)


def small_tokenizer(merge: str = "t h") -> Tokenizer:
    """Returns a byte-level tokenizer with one merge and two special tokens."""
    names = [*byte_names(), merge.replace(" ", "")]
    backend = Backend(BPE({name: id for id, name in enumerate(names)}, [tuple(merge.split(" "))]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<end>", "<pad>")])
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    return Tokenizer(fast)
