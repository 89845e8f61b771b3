"""Two tokenizers that are trained in the test and split text differently: byte-level, and like SentencePiece."""

import json

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bass_jax.checkpoint.tokenizer import Tokenizer, import_transformers

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps under the tree.",
    "A tokenizer splits the text into tokens; the tokens of two tokenizers are rarely the same.",
    "def add(first, second):\n    return first + second\n",
    "Größe, naïve café, 東京 🙂 and other words that are not ASCII.",
)
OTHER_CORPUS = (
    "Speculation drafts the next words of a text, and the target verifies the draft.",
    "The draft model has other words: over, under, first, second, return, and the rest.",
    "for index in range(10):\n    print(index)\n",
    "Die Größe der Bäume.",
)


def byte_level(vocab_size: int = 330) -> Tokenizer:
    """Returns a byte-level BPE tokenizer."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["</s>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend, eos_token="</s>")


def sentence_piece(vocab_size: int = 120) -> Tokenizer:
    """Returns a BPE tokenizer that marks spaces, with a token for every byte; 256 + 3 more than `vocab_size`."""
    trained = Backend(BPE())
    normalizer = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), "isolated")
    trained.train_from_iterator(OTHER_CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    found = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += sorted(found["vocab"], key=found["vocab"].get)
    merges = [tuple(merge) for merge in found["merges"]]
    model = BPE({name: id for id, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def _wrapped(backend: Backend, **special: str) -> Tokenizer:
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    return Tokenizer(fast)
