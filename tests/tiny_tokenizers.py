"""Small but valid tokenizers for tiny models: byte-level BPE (gpt2) and SentencePiece (llama)."""

from __future__ import annotations

from dataclasses import dataclass

import gguf

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # gguf.TokenType

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\\n'"
    " + message['content'] + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

# In merging order; each joins two pieces that exist when it is reached. "_" stands for a space.
MERGES = (
    "_ t|h e|_t he|i n|r e|_ a|o n|_ s|e r|a n|_ w|o r|in g|_a n|_an d|_ o|_o f|l l|e n|_ c|a t|"
    "i s|_t o|l o|w or|_h e|_ h|_h ell|he ll|hell o|wor ld"
)


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokenizer. `merges` is for BPE, `scores` for SentencePiece."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    bos: int
    eos: int
    add_bos: bool
    chat_template: str
    scores: list[float] | None = None
    merges: list[str] | None = None
    unknown: int | None = None


def byte_alphabet() -> list[str]:
    """GPT-2's character of each byte: printable Latin-1 is itself, the rest moves to U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def merge_pairs(space: str) -> list[tuple[str, str]]:
    """MERGES with its space written as `space`, without pairs whose halves do not exist yet."""
    known: set[str] = set()
    pairs = []
    for line in MERGES.replace("_", space).split("|"):
        left, right = line.split(" ")
        if all(len(half) == 1 or half in known for half in (left, right)):
            pairs.append((left, right))
            known.add(left + right)
    return pairs


def bpe(pre: str, *, specials_first: bool) -> Vocabulary:
    """Byte-level BPE as SmolLM2 (specials first) and Qwen (specials last) write it."""
    alphabet = byte_alphabet()
    pairs = merge_pairs(alphabet[ord(" ")])
    plain = [*sorted(alphabet), *(left + right for left, right in pairs)]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = specials + plain if specials_first else plain + specials
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=[CONTROL if token in specials else NORMAL for token in tokens],
        bos=tokens.index("<|im_start|>" if specials_first else "<|endoftext|>"),
        eos=tokens.index("<|im_end|>"),
        add_bos=False,
        chat_template=CHATML,
        merges=[" ".join(pair) for pair in pairs],
    )


def spm(*, gemma: bool) -> Vocabulary:
    """SentencePiece with byte fallback, as Llama 2 and Gemma write it."""
    head = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    extra = ["<start_of_turn>", "<end_of_turn>"] if gemma else []
    joined = [left + right for left, right in merge_pairs("\u2581")]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*joined, "\u2581", *letters, "."]
    tokens = [*head, *(f"<0x{byte:02X}>" for byte in range(256)), *extra, *pieces]
    types = [UNKNOWN if token == "<unk>" else CONTROL for token in head]
    types += [BYTE] * 256 + [CONTROL] * len(extra) + [NORMAL] * len(pieces)
    # The pieces that merge first score highest; the rest of the vocabulary is never merged.
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))]
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        bos=tokens.index("<bos>" if gemma else "<s>"),
        eos=tokens.index("<eos>" if gemma else "</s>"),
        add_bos=True,
        chat_template=GEMMA_CHAT if gemma else CHATML,
        scores=scores,
        unknown=tokens.index("<unk>"),
    )


VOCABULARIES = {
    "smollm": bpe("smollm", specials_first=True),
    "qwen2": bpe("qwen2", specials_first=False),
    "llama-spm": spm(gemma=False),
    "gemma-spm": spm(gemma=True),
}


def write_vocabulary(writer: gguf.GGUFWriter, words: Vocabulary) -> None:
    """The tokenizer.ggml.* keys, as the converter writes them."""
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
    writer.add_token_types(words.types)
    if words.merges is not None:
        writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.bos)
    writer.add_eos_token_id(words.eos)
    if words.unknown is not None:
        writer.add_unk_token_id(words.unknown)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(words.model == "llama" and "<bos>" not in words.tokens)
    writer.add_chat_template(words.chat_template)
