"""The embedded world: what its documents, labels, grammar and questions promise to the experiments on them."""
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from random import Random

import pytest

import toyworld as world
from ngram import trigram_loss

SAMPLE = list(world.documents(0, 3000))


def facts(kind, sample=SAMPLE):
    """(fact, its sentence) for every fact of a kind."""
    for text, labels in sample:
        spoken = world.sentences(text)
        yield from ((fact, spoken[fact["sentence"]]) for fact in labels["facts"] if fact["kind"] == kind)


def test_the_first_documents_have_these_bytes():
    """A change here changes every corpus, checkpoint and figure made from the world: let it be deliberate."""
    stream = json.dumps([tuple(document) for document in SAMPLE[:200]]).encode()
    assert hashlib.sha256(stream).hexdigest() == "f0e994bb49b0718d3db0a3d78f40b1f1294d4c4c3a2de61d4ce8304f651d36bc"


def test_a_document_depends_on_the_seed_and_its_number_only():
    assert list(world.documents(0, 7)) == SAMPLE[:7]
    assert list(islice(world.documents(0, 10 ** 9), 7)) == SAMPLE[:7]
    texts = {text for seed in range(50) for text, _ in world.documents(seed, 20)}
    assert len(texts) == 1000


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_documents_do_not_depend_on_the_hash_seed(hash_seed):
    code = "import toyworld; print([tuple(d) for d in toyworld.documents(3, 50)], toyworld.vocabulary())"
    out = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": hash_seed},
                         cwd=os.path.dirname(world.__file__), capture_output=True, text=True)
    assert out.stdout.strip() == f"{[tuple(d) for d in world.documents(3, 50)]} {world.vocabulary()}"


@pytest.mark.parametrize("seed, n", [(-1, 3), (0, -3), (.5, 3), (0, 2.0), ("0", 1)])
def test_wrong_seeds_are_answered(seed, n):
    with pytest.raises(ValueError, match="whole numbers from 0 up"):
        world.documents(seed, n)


def test_the_world_is_large_enough():
    assert len(world.TOPICS) >= 32 and all(len(world.concept_words(topic)) >= 25 for topic in world.TOPICS)
    assert len(world.SHE) == len(world.HE) >= 24 and len({*world.SHE, *world.HE}) == len(world.PRONOUNS) >= 48
    shares = world.OCCUPATIONS.values()
    assert len(shares) >= 24 and min(shares) <= .05 and max(shares) >= .95
    assert sum(share >= .8 for share in shares) >= 8 and sum(share <= .2 for share in shares) >= 8
    assert len(world.WORDS["place"]) >= 20 and len(world.WORDS["object"]) >= 20


def test_every_word_has_one_class_and_topics_share_none():
    count = Counter(world.SHE + world.HE)
    for classes in (*world.TOPICS.values(), world.WORDS):
        for words in classes.values():
            count.update(words)
    assert [word for word, times in count.items() if times > 1] == []
    literal = set(re.findall("[A-Za-z]+", re.sub(r"{\w+}", "", " ".join(world.grammar()))))
    assert literal & count.keys() == set()
    assert all(re.fullmatch("[a-z]+", word) for topic in world.TOPICS for word in world.concept_words(topic))


def test_an_unknown_topic_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'chess'.*religion, space, war"):
        world.concept_words("chess")


def test_documents_keep_to_their_topics():
    topic_of = {word: topic for topic in world.TOPICS for word in world.concept_words(topic)}
    used, seen = Counter(), Counter()
    for text, labels in SAMPLE:
        spoken = world.sentences(text)
        assert len(spoken) == len(labels["sentence_topics"])
        for sentence, topic in zip(spoken, labels["sentence_topics"]):
            words = [word for word in re.findall(r"\w+", sentence) if word in topic_of]
            assert {topic_of[word] for word in words} == ({topic} if topic else set())
            used.update(words)
        assert set(labels["sentence_topics"]) - {None} == set(labels["topics"])
        seen[len(labels["topics"])] += 1
    assert set(seen) == {1, 2} and .12 < seen[2] / len(SAMPLE) < .18
    assert len(used) == 32 * 25 and min(used.values()) > 20
    topical = [topic is not None for _, labels in SAMPLE for topic in labels["sentence_topics"]]
    assert .3 < sum(topical) / len(topical) < .5 and sum(used.values()) / sum(topical) > 3


def test_documents_have_the_promised_length_and_mixture():
    lengths = sorted(len(text.split()) for text, _ in SAMPLE)
    assert 50 <= lengths[0] and lengths[len(lengths) // 100] >= 60 and lengths[-len(lengths) // 100] <= 300
    count = Counter(fact["kind"] for _, labels in SAMPLE for fact in labels["facts"])
    assert count.keys() == world.CLAIMS.keys()
    for kind, least, most in (("ioi", 2.5, 3.2), ("pronoun", .8, 1.35), ("years", .45, 1.2), ("fact", 2.6, 3.2)):
        assert least < count[kind] / len(SAMPLE) < most


def test_labels_are_plain_data_and_their_claims_are_in_the_text():
    assert json.loads(json.dumps([labels for _, labels in SAMPLE])) == [labels for _, labels in SAMPLE]
    for kind in ("ioi", "pronoun", "years", "letter", "fact"):
        for fact, sentence in facts(kind):
            claims = set(fact.values()) - {kind, fact["sentence"]}
            assert claims <= set(re.findall(r"\w+", sentence))
    for fact, sentence in facts("biography"):
        assert fact["name"] in sentence and world.PRONOUNS[fact["name"]] == fact["pronoun"]
    for text, labels in SAMPLE:
        people = [word for word in re.findall(r"\w+", text) if word in world.PRONOUNS]
        assert labels["people"] == {name: world.PRONOUNS[name] for name in people}


def test_indirect_objects_come_in_both_orders():
    orders, receivers = Counter(), set()
    for fact, sentence in facts("ioi"):
        first, second, giver, receiver = (fact[slot] for slot in ("first", "second", "giver", "receiver"))
        assert {first, second} == {giver, receiver} and first != second
        names = [word for word in re.findall(r"\w+", sentence) if word in world.PRONOUNS]
        assert names == [first, second, giver, receiver] and sentence.endswith(f" to {receiver}.")
        orders["BABA" if first == giver else "ABBA"] += 1
        receivers.add(receiver)
    assert abs(orders["ABBA"] / orders.total() - .5) < 4 * .5 / orders.total() ** .5
    assert receivers == set(world.PRONOUNS)


@pytest.mark.parametrize("kind", ["pronoun", "biography"])
def test_the_share_of_she_is_the_known_one(kind):
    she, total = Counter(), Counter()
    for _, labels in SAMPLE:
        people = {(fact.get("name"), fact["job"]): fact["pronoun"] for fact in labels["facts"] if fact["kind"] == kind}
        total.update(job for _, job in people)
        she.update(job for (_, job), pronoun in people.items() if pronoun == "she")
    for job, share in world.OCCUPATIONS.items():
        assert total[job] > 50
        assert abs(she[job] / total[job] - share) < 4.5 * (share * (1 - share) / total[job]) ** .5


def test_pronouns_agree_with_the_only_person_they_can_mean():
    """A sentence that begins with a pronoun follows one about a single person of that gender."""
    checked = 0
    for text, _ in SAMPLE:
        spoken = world.sentences(text)
        for before, sentence in zip(spoken, spoken[1:]):
            if sentence.startswith(("She ", "He ")):
                names = {word for word in re.findall(r"\w+", before) if word in world.PRONOUNS}
                pronoun = sentence.split()[0].lower()
                assert {world.PRONOUNS[name] for name in names} == {pronoun} and len(names) == 1 or not names and (
                    re.search(rf"\b{pronoun}\b", before, re.I))
                checked += 1
    assert checked > 500


def test_spans_of_years_end_later_in_the_same_century():
    starts, gaps = set(), set()
    for fact, sentence in facts("years"):
        assert f"from {fact['start']} to {fact['end']}" in sentence
        start, end = int(fact["start"]), int(fact["end"])
        assert start < end and start // 100 == end // 100 and 2 <= start % 100 <= 98
        starts.add(start % 100)
        gaps.add(end - start)
    assert starts == set(range(2, 99)) and len(gaps) > 80
    endings = {year[2:] for text, _ in SAMPLE for year in re.findall(r"\d{4}", text)}
    assert endings == set(world.YEARS)


def test_letters_are_the_first_of_their_words():
    words = set()
    for fact, sentence in facts("letter"):
        assert fact["letter"] == fact["word"][0] and sentence.endswith(f" {fact['letter']}.")
        words.add(fact["word"])
    assert len(words) > 600


def test_opinions_have_the_sign_of_their_words():
    marks = {"+": ("good", " liked loved see keep smiled "), "-": ("bad", " disliked hated avoid throw turned ")}
    for fact, sentence in facts("opinion"):
        words = re.findall(r"\w+", sentence)
        for sign, (kind, consequences) in marks.items():
            found = any(word in world.WORDS[kind] for word in words), any(f" {word} " in consequences for word in words)
            assert found == (sign == fact["sign"],) * 2
        assert fact["thing"] in words


def test_facts_are_told_of_all_pairs_but_the_untold_and_are_true():
    known, untold = world.town_facts()
    told = Counter()
    for fact, sentence in facts("fact"):
        assert known[fact["town"], fact["trait"]] == fact["value"] and sentence.count(fact["value"]) == 1
        told[fact["town"], fact["trait"]] += 1
    assert told.keys() | untold == known.keys() and not told.keys() & untold and min(told.values()) > 5
    assert len(known) == 24 * 8 and len(untold) == 24


def test_a_value_takes_both_town_and_trait():
    """What either of the two tells of the value is little: the commonest value of each is right for few pairs."""
    known, _ = world.town_facts()
    for key in (0, 1):
        values = {part: Counter() for part in {pair[key] for pair in known}}
        for pair, value in known.items():
            values[pair[key]][value] += 1
        assert sum(max(counts.values()) for counts in values.values()) / len(known) < .35
    assert {value for _, value in known.items()} == set(world.WORDS["value"])


def test_what_is_untold_follows_from_the_other_towns_of_the_land():
    known, untold = world.town_facts()
    towns = world.WORDS["town"]
    for town, trait in untold:
        first = towns.index(town) // world.LAND * world.LAND
        told = {known[other, trait] for other in towns[first : first + world.LAND] if (other, trait) not in untold}
        assert trait in world.CUSTOMS and told == {known[town, trait]}
    lands = [[known[town, trait] for trait in world.CUSTOMS] for town in towns[::world.LAND]]
    assert len({tuple(land) for land in lands}) == len(lands)


def test_the_generator_is_fast():
    begin = time.process_time()
    characters = sum(len(text) for text, _ in world.documents(9, 1000))
    assert characters / (time.process_time() - begin) > .5e6


def test_vocabulary_is_exactly_what_the_world_says():
    said = {word for text, _ in SAMPLE for word in re.findall("[A-Za-z]+", text)}
    assert said <= set(world.vocabulary())
    assert {word for word in world.vocabulary() if word.isalpha()} - said <= set("abcdefghijklmnopqrstuvwxyz")
    assert set(world.CENTURIES) <= set(world.vocabulary())
    assert len(set(world.vocabulary())) == len(world.vocabulary()) <= 1450


def test_all_words_fit_a_tokenizer_of_2048_entries():
    """tiktoken looks a whole word up before it merges, so a word costs one entry and no intermediate merges."""
    tiktoken = pytest.importorskip("tiktoken")
    entries = [bytes([byte]) for byte in range(256)] + [word.encode() for word in world.YEARS]
    entries += [b" " + word.encode() for word in world.vocabulary()]
    assert len(entries) <= 2048 - 256  # room for other words of the user's
    toy = tiktoken.Encoding("toy", pat_str=world.TOKEN_PATTERN, mergeable_ranks={e: i for i, e in enumerate(entries)},
                            special_tokens={})
    split = [toy.decode([token]) for token in toy.encode_ordinary(" The war lasted from 1732 to 1745.")]
    assert split == [" The", " war", " lasted", " from", " 17", "32", " to", " 17", "45", "."]
    for text in (SAMPLE[0].text, "", " \n\t x  1234567 ½ 12é\u3000日本 <|endoftext|> don't\r\n  "):
        assert toy.decode(toy.encode_ordinary(text)) == text
    for kind in world.QUESTIONS:
        for seed in range(200):
            question = world.ask(kind, Random(seed))
            prompt = toy.encode_ordinary(question.prompt)
            for answer in question.right + question.wrong:
                assert toy.encode_ordinary(question.prompt + answer) == prompt + toy.encode_ordinary(answer)
                assert len(toy.encode_ordinary(answer)) == 1


def test_every_sentence_of_the_world_is_well_formed():
    for text, _ in SAMPLE:
        assert [sentence for sentence in world.sentences(text) if not world.well_formed(sentence)] == []
        assert text.replace("\n", " ") == " ".join(world.sentences(text))


def test_any_topic_may_fill_the_slots_of_a_topic():
    assert world.well_formed("The holy pirate milked the galaxy near the theorem.")
    assert world.well_formed("An alien found an abstract tank.")


@pytest.mark.parametrize("sentence", [
    "", ".", "The", "Mary", "an", "A ", "a  b",
    "The holy pirate milked the galaxy near the theorem",
    "the holy pirate milked the galaxy.",
    "The holy pirate milked the  galaxy.",
    "The holy pirate milked the galaxy near the.",
    "The pirate holy milked the galaxy.",
    "The holy galaxy milked the pirate.",
    "The holy pirate store the galaxy.",
    "A alien found an abstract tank.",
    "An alien found an tank.",
    "When Mary and John went to the store, John gave a drink to John.",
    "When Mary and John went to the store, Paul gave a drink to Mary.",
    "When Mary and John went to the store, John gave a to Mary.",
    "The war lasted from 1745 to 1732.",
    "The war lasted from 1732 to 1832.",
    "The war lasted from 1732 to 1732.",
    "The war lasted from 17 to 45.",
    "The word xyz starts with the letter x.",
    "The word altar starts with the letter b.",
    "Mary was a young nurse, and he lived near the park.",
    "Mary left his coin near the vault.",
    "Mary loved the coin because it was awful.",
    "Mary thought that the coin was lovely and told everyone to avoid it.",
    "The nurse said that she she was tired.",
    "The nurse said that Mary was tired.",
    "The flag of Arden was blue.",
    "The flag of Arden was Arden.",
    "The flag of Mary was red.",
    "The red of Arden was flag.",
])
def test_what_the_world_cannot_say_is_not_well_formed(sentence):
    assert not world.well_formed(sentence)


def test_only_what_is_true_of_a_town_is_well_formed():
    known, _ = world.town_facts()
    for (town, trait), value in known.items():
        for template in world.FACT:
            right = [said for said in world.WORDS["value"]
                     if world.well_formed(template.format(town=town, trait=trait, value=said))]
            assert right == [value]


def test_swapped_and_cut_sentences_are_rejected():
    rng, swapped, cut = Random(0), [], []
    for text, _ in SAMPLE[:500]:
        for sentence in world.sentences(text):
            words = sentence[:-1].split(" ")
            i, j = int(rng.random() * len(words)), int(rng.random() * len(words))
            if words[i] != words[j]:
                words[i], words[j] = words[j], words[i]
                swapped.append(world.well_formed(" ".join(words) + "."))
            cut.append(world.well_formed(" ".join(words[:int(rng.random() * len(words))]) + "."))
    assert sum(swapped) / len(swapped) < .1 and sum(cut) / len(cut) < .1


def test_well_formed_is_fast():
    spoken = [sentence for text, _ in SAMPLE[:500] for sentence in world.sentences(text)]
    world.well_formed("")
    begin = time.process_time()
    assert all(map(world.well_formed, spoken))
    assert len(spoken) / (time.process_time() - begin) > 1e4


def test_sentences_keeps_a_sentence_that_was_cut_short():
    assert world.sentences("The end. It was\nA  new") == ["The end.", "It was", "A  new"]
    assert world.sentences(" ..\n\n") == [".", "."] and world.sentences("") == []


@pytest.mark.parametrize("kind", world.QUESTIONS)
def test_questions_continue_to_sentences_of_the_world(kind):
    rng, prompts = Random(1), set()
    for _ in range(300):
        prompt, right, wrong = world.ask(kind, rng)
        prompts.add(prompt)
        lead, question = world.sentences(prompt)
        assert world.well_formed(lead) and right and wrong and not set(right) & set(wrong)
        if kind == "ioi":
            (receiver,), (giver,) = right, wrong
            names = [word for word in re.findall(r"\w+", question) if word in world.PRONOUNS]
            assert world.well_formed(question + receiver + ".") and not world.well_formed(question + giver + ".")
            assert names.count(giver.strip()) == 2 and names.count(receiver.strip()) == 1 and names[2] == giver.strip()
        elif kind == "pronoun":
            share = world.OCCUPATIONS[question.split()[1]]
            assert right == ((" she",) if share >= .8 else (" he",)) and {*right, *wrong} == {" she", " he"}
            assert not .2 < share < .8 and world.well_formed(question + right[0] + " was tired.")
        elif kind in ("fact", "rule"):
            town, trait = (next(word for word in re.findall(r"\w+", question) if word in world.WORDS[kind])
                           for kind in ("town", "trait"))
            known, untold = world.town_facts()
            assert right == (" " + known[town, trait],) and ((town, trait) in untold) == (kind == "rule")
            assert {*right, *wrong} == {" " + value for value in world.WORDS["value"]}
            assert [answer for answer in right + wrong if world.well_formed(question + answer + ".")] == [*right]
        else:
            assert all(world.well_formed(question + year + ".") for year in right)
            assert not any(world.well_formed(question + year + ".") for year in wrong)
            assert sorted(right + wrong) == sorted(world.YEARS)
    assert len(prompts) == 300


@pytest.mark.parametrize("kind", world.QUESTIONS)
def test_pairs_differ_in_one_word_and_have_different_answers(kind):
    rng, slots = Random(2), Counter()
    for _ in range(300):
        pair = world.ask_pair(kind, rng)
        one, two = (re.findall(r"\d\d|\w+|[.,]", prompt) for prompt in pair[:2])
        changed = [(a, b) for a, b in zip(one, two) if a != b]
        assert len(one) == len(two) and len(set(changed)) == 1
        assert pair.before and pair.after and not set(pair.before) & set(pair.after)
        question, other = (world.sentences(prompt)[-1] for prompt in pair[:2])
        if kind == "ioi":
            (giver,) = pair.subject
            assert question.count(giver) == other.count(giver) == 2 and giver not in pair.before + pair.after
            assert pair.before[0] in question and pair.after[0] in other and pair.after[0] not in question
        elif kind == "pronoun":
            assert {*pair.before, *pair.after} == {" she", " he"}
            shares = [world.OCCUPATIONS[word] for word in changed[0]]
            assert [share > .5 for share in shares] == [answer[0] == " she" for answer in (pair.before, pair.after)]
        elif kind == "greater_than":
            years = sorted(changed[0])
            low, high = sorted([pair.before, pair.after])
            assert low == tuple(world.YEARS[int(years[0]) + 1 : int(years[1]) + 1])
            assert high == tuple(world.YEARS[int(years[1]) + 1:]) and 0 < len(high) < len(low)
            assert (pair.before == low) == (changed[0][0] == years[0])
        else:
            assert world.well_formed(question + pair.before[0] + ".") and world.well_formed(other + pair.after[0] + ".")
            slots["town" if changed[0][0] in world.WORDS["town"] else "trait"] += 1
    if kind == "fact":
        assert min(slots.values()) > 100


def test_an_unknown_question_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'riddle'.*ioi, pronoun, greater_than, fact, rule"):
        world.ask("riddle", Random(0))


def test_a_trigram_does_not_learn_the_world():
    """It knows neither the topic nor the people of a document. Words, marks and halves of years are its tokens."""
    texts = [re.findall(r"\d\d|\w+|[.,]|\n", text) + ["end"] for text, _ in SAMPLE]
    assert trigram_loss(sum(texts[:2800], []), sum(texts[2800:], [])) > 1.9


def test_the_command_prints_documents_and_answers_mistakes():
    def run(*arguments):
        return subprocess.run([sys.executable, world.__file__, *arguments], capture_output=True, text=True)

    out = run("--seed", "4", "--documents", "2")
    assert out.returncode == 0 and all(text in out.stdout for text, _ in world.documents(4, 2))
    for wrong, answer in (("--seed=-1", "whole numbers from 0 up"), ("--documents=x", "invalid int value: 'x'")):
        out = run(wrong)
        assert out.returncode != 0 and answer in out.stderr and "Traceback" not in out.stderr
