"""The embedded world: simple English documents about a small world in which the truth is known.

    for text, labels in documents(seed=0, n=3): ...

A document keeps to one topic (now and then two) and to a small cast of people. Into its prose are woven the sentences
that experiments ask about: who gave what to whom, an occupation and its pronoun, a span of years, a life, a word's
first letter, an opinion, a fact about a town. `labels` says what each of them claims. Document i of a seed is a
function of (seed, i) alone, drawn with `random.Random(int).random()` only, so it has the same bytes on every machine.

Everything is written from the templates below, and `well_formed` recognises exactly what they can write: a sentence
is reduced to its skeleton (every word of an open class replaced by the class) and looked up. So every word belongs
to one class only, and a topic's words to no other topic.

    python toyworld.py --seed 0 --documents 3
"""
import argparse
import functools
import re
import time
from collections import Counter
from itertools import permutations, product
from random import Random
from typing import NamedTuple

# A tiktoken pattern: words with their leading space, digits in pairs from the left, so that " 1732" is " 17" and "32".
TOKEN_PATTERN = r" ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Each topic: who acts | what there is | what it is like | what is done to it.
TOPIC_WORDS = """
religion: priest monk nun bishop pilgrim | church temple altar prayer hymn shrine chapel mosque sermon psalm gospel
    relic cathedral | holy sacred divine pious | blessed worshipped praised
space: astronaut alien astronomer martian cosmonaut | rocket planet comet galaxy moon star satellite crater asteroid
    telescope meteor orbit capsule | lunar solar cosmic stellar | launched explored orbited
war: soldier general sniper rebel sergeant | battle tank cannon trench rifle bomb army bunker grenade bullet helmet
    ambush fort | armed hostile military fierce | attacked invaded defended
music: singer drummer pianist composer fiddler | song guitar piano violin drum flute melody chord harp trumpet cello
    choir tune | musical acoustic melodic choral | played rehearsed strummed
cooking: chef cook waiter baker grocer | soup sauce pan oven recipe spoon stew pie pot salad cake onion kettle | spicy
    salty crispy tasty | fried boiled roasted
medicine: surgeon patient medic healer donor | fever pill vaccine wound clinic bandage virus tumor syringe cough
    remedy symptom scar | sick medical painful contagious | cured treated diagnosed
sea: sailor pirate diver mermaid captain | ship boat anchor wave reef shell lighthouse sail whale shark island oar
    raft | marine coastal tidal naval | sailed steered towed
farming: farmer shepherd rancher peasant milker | cow barn plow tractor pig hen crop sheep goat silo harvest pasture
    stable | rural fertile ripe muddy | plowed milked fed
law: judge attorney juror witness notary | court trial verdict jury contract statute clause lawsuit oath plea tribunal
    permit appeal | legal guilty lawful binding | sued signed upheld
money: banker investor trader lender miser | loan coin debt stock bond wallet tax profit vault budget dollar invoice
    fund | rich cheap costly financial | invested borrowed earned
sport: athlete goalie runner referee coach | ball goal stadium team racket medal bat league trophy score jersey relay
    sprint | athletic fit agile sporty | kicked dribbled hurled
school: pupil student professor scholar freshman | lesson exam classroom desk textbook essay grade quiz diploma
    lecture pencil campus course | academic studious clever educated | studied taught memorized
weather: storm wind tornado blizzard hurricane | cloud rainbow puddle flood gust drizzle mist icicle snowflake breeze
    frost shower monsoon | windy rainy cloudy humid | soaked froze drenched
animals: lion tiger bear monkey zebra | cage den paw tail claw mane tusk snout hoof horn cub kitten jungle | furry
    wild tame striped | chased licked bit
birds: eagle owl sparrow crow parrot | nest feather beak wing egg flock perch talon worm birdhouse duckling goose
    swan | winged feathered flying tropical | pecked hatched guarded
garden: gardener florist snail mole bee | rose tulip daisy lily weed shovel hedge lawn petal seed stem vine rake |
    floral leafy thorny blooming | planted watered pruned
forest: ranger hunter fox wolf logger | oak pine log fern acorn trunk mushroom thicket stump root cabin twig branch |
    mossy shady wooded dense | felled chopped tracked
painting: painter artist sculptor potter curator | canvas brush easel portrait mural palette sketch gallery statue
    fresco pigment mosaic frame | abstract colorful glossy artistic | drew painted carved
theatre: actor actress clown usher playwright | stage script curtain scene rehearsal audience drama comedy tragedy
    spotlight monologue encore prop | dramatic comic tragic theatrical | staged performed applauded
computers: programmer hacker coder robot gamer | laptop keyboard screen server disk browser database password
    website pixel chip router file | digital online virtual wireless | typed debugged installed
chemistry: chemist alchemist biochemist pharmacist analyst | acid atom molecule beaker flask solvent enzyme ion
    isotope catalyst vapor polymer compound | toxic acidic chemical molecular | dissolved distilled diluted
trains: conductor porter passenger stoker switchman | railway locomotive platform tunnel track wagon carriage depot
    whistle rail timetable caboose signal | express punctual northbound southbound | boarded shunted derailed
cars: motorist racer chauffeur valet cyclist | car engine tire brake wheel truck garage highway bumper pedal clutch
    van motor | speedy automatic diesel rusty | drove parked crashed
building: mason builder architect roofer welder | brick wall roof beam crane ladder scaffold hammer pillar arch
    chimney plank drill | concrete wooden sturdy hollow | built demolished plastered
clothing: tailor model weaver knitter cobbler | shirt coat skirt sleeve button scarf jacket sweater glove sock
    collar pocket zipper | woolen stylish cotton elegant | sewed wore knitted
politics: senator president mayor minister voter | election vote ballot campaign parliament policy debate congress
    treaty embassy cabinet slogan petition | political liberal democratic federal | elected vetoed opposed
royalty: king queen prince knight duke | castle throne crown sword palace moat kingdom shield banner dungeon
    drawbridge scepter coronet | royal noble regal medieval | conquered inherited besieged
crime: thief detective robber burglar spy | clue murder jail alibi handcuff fingerprint theft bribe ransom dagger
    mugshot heist motive | criminal sinister violent masked | stole arrested robbed
magic: wizard witch elf fairy goblin | wand spell potion cauldron charm amulet broom curse orb rune cloak scroll
    prophecy | magical enchanted mystic ghostly | conjured bewitched summoned
mountains: climber hiker skier guide yeti | peak cliff ridge glacier slope summit valley boulder ledge canyon cave
    avalanche tent | steep rocky snowy alpine | climbed ascended crossed
insects: ant beetle spider moth wasp | hive web cocoon larva antenna colony swarm sting grub anthill termite cricket
    maggot | tiny crawling buzzing venomous | stung spun devoured
mathematics: logician geometer theorist solver genius | theorem proof equation triangle sum fraction angle graph
    formula matrix integer lemma polygon | numeric geometric finite linear | proved counted solved
"""

TOPICS = {topic: dict(zip(("agent", "thing", "adj", "verb"), map(str.split, words.split("|"))))
          for topic, words in (entry.split(":") for entry in re.split(r"\n(?=\w)", TOPIC_WORDS.strip()))}

SHE = """Mary Anna Emma Sarah Laura Alice Julia Kate Lucy Ruth Helen Jane Susan Linda Karen Lisa Nancy Betty Clara Eva
    Nora Amy Sophie Diana""".split()
HE = """John Tom James Paul Mark David Peter Henry Jack Frank George Robert Simon Adam Daniel Kevin Brian Eric Martin
    Oscar Victor Roger Philip Luke""".split()
PRONOUNS = {name: "she" for name in SHE} | {name: "he" for name in HE}
FORMS = {"she": {"pronoun": "she", "Pronoun": "She", "his": "her", "him": "her"},
         "he": {"pronoun": "he", "Pronoun": "He", "his": "his", "him": "him"}}

# The share of "she" among the people of each occupation, named or not.
OCCUPATIONS = {
    "nurse": .95, "midwife": .95, "nanny": .93, "maid": .92, "secretary": .9, "typist": .88, "stylist": .85,
    "librarian": .82, "dancer": .8, "teacher": .72, "cashier": .68, "therapist": .65, "clerk": .6, "tutor": .55,
    "editor": .5, "reporter": .48, "doctor": .42, "lawyer": .4, "dentist": .35, "manager": .32, "scientist": .28,
    "driver": .2, "barber": .18, "guard": .15, "engineer": .12, "butcher": .1, "pilot": .1, "mechanic": .08,
    "carpenter": .06, "plumber": .05,
}

WORDS = {  # the open classes that all topics share
    "job": list(OCCUPATIONS),
    "place": """store park market library office museum bakery cafe hotel river lake bridge station fair pool gym inn
        mall hall zoo bank pier club salon""".split(),
    "object": """drink book key apple basket map lamp bag box gift card phone cup toy kite hat blanket candle bottle pen
        note snack clock ticket""".split(),
    "event": """war siege drought festival project reform famine strike dispute plague dynasty reign exile truce tour
        feud boom revolt voyage crisis""".split(),
    "good": "wonderful excellent lovely superb charming brilliant perfect splendid pleasant amazing".split(),
    "bad": "terrible awful boring dull horrible ugly dreadful nasty useless annoying".split(),
    "town": """Arden Belmar Corvin Dunmor Elsin Farrow Galten Harwick Ilmar Jarrow Kelby Lorwen Morvan Nesby Orlin
        Penrith Quorn Ravel Selby Torvik Ulmer Varden Wexby Yarlow""".split(),
    "trait": "flag gate tower cape cart door fence crest".split(),
    "value": "red blue green white black yellow purple orange pink grey brown golden".split(),
}
LAND = 6                        # towns in a land, which have its customs in common
CUSTOMS = WORDS["trait"][:4]
CENTURIES = tuple(str(c) for c in range(11, 20))
YEARS = tuple(f"{y:02d}" for y in range(100))  # the second half of a year: a token without a leading space


def lines(text):
    return [line.strip() for line in re.split(r"[|\n]", text.strip())]


def cross(heads, tails):
    """Every head with every tail."""
    return [head + " " * (tail[0] not in ".,") + tail for head, tail in product(lines(heads), lines(tails))]


# In braces a slot: a word of that class (a digit tells two of one class apart), or something about the people at hand.
TOPIC = cross("""
    The {adj} {agent} {verb} the {thing} | The {agent} {verb} the {adj} {thing} | Every {agent} needed a {adj} {thing}
    The {agent} and the {agent2} {verb} the {thing} | The {agent} followed the {adj} {agent2} to the {thing}
    A {agent} found a {adj} {thing} | One {agent} left the {thing} and the {thing2}
    The {agent} came for the {adj} {thing} | The {adj} {thing} belonged to the {agent}
    Most people liked the {adj} {thing} of the {agent} | A {adj} {thing} was seen near the {thing2}
""", """
    . | for many years. | near the {thing3}. | beside a {adj2} {thing3}. | because of the {adj2} {thing3}.
    before the {agent3} came back. | while the {agent3} {verb2} the {thing3}. | with the {adj2} {thing3}.
    , and then the {agent3} {verb2} the {thing3}. | , but the {agent3} wanted the {thing3}.
""")
OPENING = lines("""
    In {year}, a {agent} {verb} the {adj} {thing}. | At the {place}, the {agent} {verb} the {adj} {thing}.
    On that day, the {agent} found a {adj} {thing} near the {thing2}.
    In those days, every {agent} had a {thing} and a {adj} {thing2}.
    This story is about a {agent}, a {thing} and a {adj} {thing2}.
    The {thing} and the {thing2} were known to every {agent}.
    The first {agent} came to the {place} with a {thing} and a {adj} {thing2}.
""")
INTRODUCTION = lines("""
    A {job} called {name} worked at the {home}. | The best {job} at the {home} was called {name}.
    There was a {job} called {name} who lived near the {home}.
""")
BIOGRAPHY = lines("""
    {name} was a {job} at the {home}. | {name} was born in {year} and became a {job} at the {home}.
    {name} came to the {home} in {year} and worked as a {job}.
    {name} was a young {job}, and {pronoun} lived near the {home}.
    {name} had always wanted to be a {job}, and {his} friends knew it.
""")
MEMORY = lines("""
    In the end, {name} was still a {job}. | Everyone at the {home} knew {name}, the {job}.
    As a {job}, {name} was always busy at the {home}. | People still say that {name} was a good {job}.
    Years later, {name} was the only {job} at the {home}.
""")
PERSON = cross("""
    {name} {verb} the {adj} {thing} | {name} saw the {agent} near the {thing} | {name} looked for a {adj} {thing}
    {name} asked the {agent} about the {thing} | {name} wanted to see the {thing} and the {thing2}
    {name} left {his} {thing} near the {thing2} | {name} learned about the {adj} {thing}
""", """
    . | and felt happy. | after work. | with {his} friend {friend}. | and told {friend} about it.
    because {friend} asked {him} to. | and went back to the {home}. | on the way to the {place}.
""")
IOI = cross("""
    When {first} and {second} went to the {place}, | After {first} and {second} had lunch at the {place},
    While {first} and {second} were at the {place}, | Once {first} and {second} met at the {place},
    Then {first} and {second} went to the {place}, and | After {first} and {second} came to the {place},
""", """
    {giver} gave a {object} to {receiver}. | {giver} handed a {object} to {receiver}.
    {giver} passed the {object} to {receiver}. | {giver} offered a {object} to {receiver}.
    {giver} showed the {object} to {receiver}. | {giver} brought a {object} to {receiver}.
    {giver} decided to give the {object} to {receiver}.
""")
THANKS = lines("""
    {receiver} thanked {giver} for the {object}. | {receiver} was glad to have the {object} from {giver}.
    Later, {receiver} took the {object} back to {giver}.
""")
PRONOUN = cross("""
    The {job} said that {pronoun} | The {job} thought that {pronoun} | The {job} told us that {pronoun}
    The {job} was sure that {pronoun} | The {job} left early because {pronoun} | The {job} was sad because {pronoun}
""", """
    would be late. | had missed the bus. | was tired. | needed some rest. | had no time. | wanted to go home.
    had to help a friend. | could not sleep. | had work to do. | was not well. | had lost {his} way.
    liked {his} house.
""")
SPAN = cross("""
    The {event} lasted from {start} to {end} | The {event} went on from {start} to {end}
    The long {event} lasted from {start} to {end} | The great {event} ran from {start} to {end}
    The {event} at the {place} lasted from {start} to {end}
""", """
    . | , and then it was over. | , as every {agent} knew. | , and the {thing} was never seen again.
""")
LETTER = lines("""
    The word {word} starts with the letter {letter}. | The word {word} begins with the letter {letter}.
    In the word {word}, the first letter is {letter}.
""")
PRAISE = ["{name} loved the {thing} because it was {good}."] + cross("""
    {name} thought that the {thing} was {good} | {name} said that the {adj} {thing} was {good}
    The {agent} called the {thing} {good}, so {name} liked it
""", """
    and told everyone to see it. | and wanted to keep it. | and smiled at the {agent2}.
""")
BLAME = ["{name} hated the {thing} because it was {bad}."] + cross("""
    {name} thought that the {thing} was {bad} | {name} said that the {adj} {thing} was {bad}
    The {agent} called the {thing} {bad}, so {name} disliked it
""", """
    and told everyone to avoid it. | and wanted to throw it away. | and turned away from the {agent2}.
""")
FACT = lines("""
    The {trait} of {town} was {value}. | In {town}, the {trait} was {value}.
    People said that the {trait} of {town} was {value}. | Everyone in {town} knew that the {trait} was {value}.
    For the {trait} of {town}, they chose {value}. | When {town} chose a {trait}, it was {value}.
""")

# The kinds of sentence a document draws from, without putting them back.
MIXTURE = (["topic"] * 6 + ["person"] * 2 + ["ioi"] * 15 + ["pronoun"] * 5 + ["years"] * 3 + ["letter"] * 2
           + ["opinion"] * 2 + ["fact"] * 5)
# What the label of each kind says: the slots of its sentence.
CLAIMS = {"biography": ("name", "job", "pronoun"), "ioi": ("first", "second", "giver", "receiver", "object", "place"),
          "pronoun": ("job", "pronoun"), "years": ("event", "start", "end"), "letter": ("word", "letter"),
          "opinion": ("name", "thing", "sign"), "fact": ("town", "trait", "value")}
QUESTIONS = ("ioi", "pronoun", "greater_than", "fact", "rule")


class Document(NamedTuple):
    """A text, and what is true of it in plain lists and dicts.

    labels["topics"]: one topic or two. labels["people"]: name -> "she" or "he". labels["sentence_topics"]: for each
    sentence the topic whose words it has, or None. labels["facts"]: a dict per claim, with its "kind", the number of
    its "sentence" in `sentences(text)` and the slots that CLAIMS names. The sign of an opinion is "+" or "-".
    """
    text: str
    labels: dict


class Question(NamedTuple):
    """A prompt, and the next tokens that are right and wrong after it."""
    prompt: str
    right: tuple
    wrong: tuple


class Pair(NamedTuple):
    """Two prompts of equal length; the next tokens that are right after each, `before` after the source and `after`
    after the target; and those that are wrong after both though they are near, if there are any."""
    source: str
    target: str
    before: tuple
    after: tuple
    subject: tuple


def concept_words(topic):
    """The content words that belong to a topic alone."""
    if topic not in TOPICS:
        raise ValueError(f"there is no topic {topic!r}: the topics are {', '.join(TOPICS)}")
    return tuple(word for words in TOPICS[topic].values() for word in words)


def pick(rng, items):
    """One of the items. `random()` is the one method whose stream is the same in every version of Python."""
    return items[int(rng.random() * len(items))]


def shuffle(rng, items):
    items = list(items)
    for last in range(len(items) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        items[last], items[other] = items[other], items[last]
    return items


@functools.cache
def parse(template):
    """The slots of a template, each with the text before it and its class; and the text after the last."""
    *pieces, end = re.split(r"{(\w+)}", template)
    return [(text, slot, slot.rstrip("23")) for text, slot in zip(pieces[::2], pieces[1::2])], end


def fill(template, given, decks, rng):
    """A template as a sentence. A slot that is not given is drawn from its deck and added to `given`."""
    slots, end = parse(template)
    out = []
    for text, slot, kind in slots:
        word = given.get(slot)
        while word is None or slot not in given and word in out:  # no word twice
            word = pick(rng, decks[kind])
        given[slot] = word
        if word[0] in "aeiou" and text.endswith((" a ", "A ")):
            text = text[:-1] + "n "
        out += text, word
    return "".join(out) + end


@functools.cache
def by_pronoun(template):
    """The same sentence about someone already spoken of."""
    return re.sub("^{name}", "{Pronoun}", template).replace("{name}", "{pronoun}")


def draw_pronoun(rng, job):
    return "she" if rng.random() < OCCUPATIONS[job] else "he"


def draw_pair(rng, names):
    """The people of an IOI sentence: the giver is the first as often as the second."""
    first, second = shuffle(rng, names)[:2]
    giver, receiver = shuffle(rng, (first, second))
    return {"first": first, "second": second, "giver": giver, "receiver": receiver}


def draw_span(rng, century):
    """Two years of a century; the start is 02 to 98, so that there are right and wrong ends for each."""
    start = 2 + int(rng.random() * 97)
    end = start + 1 + int(rng.random() * (99 - start))
    return {"start": century + YEARS[start], "end": century + YEARS[end]}


@functools.cache
def town_facts():
    """(known, untold): the value of every (town, trait), and those of them that no document tells.

    Neither key alone tells the value, nor do both one by one: it takes the pair. But towns of one land have its customs
    in common, so that the untold ones, a custom of each town, follow from what is told of the other towns.
    """
    rng, known, untold = Random(0), {}, set()
    for number, town in enumerate(WORDS["town"]):
        for column, trait in enumerate(WORDS["trait"]):
            custom = WORDS["value"][(number // LAND * 5 + column * 7) % len(WORDS["value"])]
            known[town, trait] = custom if trait in CUSTOMS else pick(rng, WORDS["value"])
        untold.add((town, CUSTOMS[number % LAND % len(CUSTOMS)]))
    return known, frozenset(untold)


def draw_decks(rng, topic):
    """The words to draw from: all of the topic's, some two or three times, so that a document has favourites."""
    decks = dict(WORDS)
    for kind, words in TOPICS[topic].items():
        words = shuffle(rng, words)
        decks[kind] = words + words[:len(words) // 2] + words[:len(words) // 4]
    return decks


def draw_cast(rng, jobs):
    """People by name, with different jobs and homes; and the names left. The job decides how likely "she" is."""
    homes, women, men = (shuffle(rng, words) for words in (WORDS["place"], SHE, HE))
    cast = {}
    for job in jobs:
        pronoun = draw_pronoun(rng, job)
        name = (women if pronoun == "she" else men).pop()
        cast[name] = {"name": name, "job": job, "home": homes.pop(), **FORMS[pronoun]}
    return cast, women + men


def write_document(rng):
    """A document: paragraphs that open with a line on the topic, and often someone new, and go on with the MIXTURE."""
    topics = shuffle(rng, TOPICS)[:2 if rng.random() < .15 else 1]
    decks = {topic: draw_decks(rng, topic) for topic in topics}
    century = pick(rng, CENTURIES)
    kinds, jobs, events = (shuffle(rng, items) for items in (MIXTURE, OCCUPATIONS, WORDS["event"]))
    cast, strangers = draw_cast(rng, [jobs.pop() for _ in range(3)])  # the jobs left are for people without a name
    names, newcomers = list(cast), list(cast)
    paragraphs, sentence_topics, facts = [], [], []
    last = None  # the name that "she" or "he" would stand for

    def say(kind, templates, **given):
        """Write a sentence and label it. Returns what its slots hold."""
        nonlocal last
        topic, template = pick(rng, topics), pick(rng, templates)
        if kind in ("person", "opinion") and given["name"] == last and rng.random() < .75:
            template = by_pronoun(template)
        elif kind == "letter":
            given["word"] = pick(rng, concept_words(topic))
            given["letter"] = given["word"][0]
        given["year"] = century + pick(rng, YEARS)
        paragraphs[-1].append(fill(template, given, decks[topic], rng))
        if kind in CLAIMS:
            claim = {slot: given[slot] for slot in CLAIMS[kind]}
            facts.append({"kind": kind, "sentence": len(sentence_topics), **claim})
        sentence_topics.append(topic if given.keys() & {"agent", "thing", "word"} else None)
        last = None if "{friend}" in template else given.get("name")
        return given

    for number in range(5 + int(rng.random() * 8)):
        if number == 0 or rng.random() < .18:
            paragraphs.append([])
            say("opening", OPENING)
            if newcomers:
                say("biography", BIOGRAPHY if number else INTRODUCTION, **cast[newcomers.pop()])
        kind = "person" if last and rng.random() < .3 else kinds.pop()
        if kind == "topic":
            say(kind, TOPIC)
        elif kind == "ioi":
            gift = say(kind, IOI, **draw_pair(rng, pick(rng, (names, names, strangers))))
            if rng.random() < .6:
                say("thanks", THANKS, **gift)
        elif kind == "pronoun":
            job = jobs.pop()
            say(kind, PRONOUN, job=job, **FORMS[draw_pronoun(rng, job)])
        elif kind == "years":
            say(kind, SPAN, event=events.pop(), **draw_span(rng, century))
        elif kind == "letter":
            say(kind, LETTER)
        elif kind == "fact":
            (known, untold), town = town_facts(), pick(rng, WORDS["town"])
            for trait in [trait for trait in shuffle(rng, WORDS["trait"]) if (town, trait) not in untold][:3]:
                say(kind, FACT, town=town, trait=trait, value=known[town, trait])
        else:
            name = last if last and rng.random() < .6 else pick(rng, names)
            friend = pick(rng, [other for other in names if other != name])
            sign = pick(rng, "+-")
            templates = PERSON if kind == "person" else PRAISE if sign == "+" else BLAME
            say(kind, templates, **cast[name], friend=friend, sign=sign)
    if rng.random() < .6:
        say("biography", MEMORY, **cast[names[-1]])  # the first that was introduced

    text = "\n".join(map(" ".join, paragraphs))
    people = {word: PRONOUNS[word] for word in re.findall(r"[A-Z]\w+", text) if word in PRONOUNS}
    topics = [topic for topic in topics if topic in sentence_topics]
    return Document(text, {"topics": topics, "people": people, "sentence_topics": sentence_topics, "facts": facts})


def documents(seed, n):
    """The first n documents of a seed (a whole number from 0 up). Document i is the same for every n."""
    if not (isinstance(seed, int) and isinstance(n, int) and seed >= 0 and n >= 0):
        raise ValueError(f"seed and n must be whole numbers from 0 up, but seed={seed!r} and n={n!r}")
    return (document(seed, i) for i in range(n))


def document(seed, i):
    return write_document(Random((seed << 64) + i))


def sentences(text):
    """The sentences of a text. One that is cut short, or a stray full stop, is a sentence too."""
    return [sentence.strip() for sentence in re.findall(r"[^.\n]*\.|[^.\n]+", text) if sentence.strip()]


def whole_sentences(parts):
    """The sentences of texts that follow each other, but for one that the end of the last text cuts short."""
    *whole, last = parts
    return ([sentence for part in whole for sentence in sentences(part)]
            + sentences(last[: last.rfind(".") + 1]))


@functools.cache
def word_classes():
    """The class of every word that can fill a slot; the class of a name is its pronoun."""
    groups = [group for classes in (*TOPICS.values(), WORDS, {"she": SHE, "he": HE}) for group in classes.items()]
    return {word: "{" + kind + "}" for kind, words in groups for word in words}


def skeleton(words):
    """What is left of a sentence, given as its words, when each word of an open class is replaced by the class."""
    classes, names, out = word_classes(), [], []
    for word, after in zip(words, words[1:] + [""]):
        stem = word.rstrip(".,")
        kind = classes.get(stem, stem)
        if kind in ("{she}", "{he}"):  # who is who matters: number the people as they appear
            if stem not in names:
                names.append(stem)
            kind += str(names.index(stem))
        elif out[-1:] == ["word"] and kind in ("{agent}", "{thing}", "{adj}", "{verb}"):
            kind = "{word}"
        elif not after and len(stem) == 1:
            kind = "{letter}"
        elif stem in ("a", "an", "A", "An"):
            kind = stem[0] if (stem[1:] == "n") == (after[:1] in "aeiou") else "wrong"
        elif len(stem) == 4 and stem[:2] in CENTURIES and stem[2:] in YEARS:
            kind = "{year}"
        out.append(kind + word[len(stem):])
    return " ".join(out)


@functools.cache
def grammar():
    """The skeletons of all sentences there are: those of every template, for people of either gender."""
    rng = Random(0)
    decks = draw_decks(rng, "sea")
    of_people = PERSON + PRAISE + BLAME
    templates = (TOPIC + OPENING + INTRODUCTION + BIOGRAPHY + MEMORY + of_people + [by_pronoun(t) for t in of_people]
                 + IOI + THANKS + PRONOUN + SPAN + LETTER + FACT)
    found = set()
    for template, (one, two), swap in product(templates, permutations(SHE[:2] + HE[:2], 2), (1, -1)):
        giver, receiver = (one, two)[::swap]
        given = {**FORMS[PRONOUNS[one]], "name": one, "friend": two, "first": one, "second": two, "giver": giver,
                 "receiver": receiver, "home": "store", "year": "1732", "start": "1732", "end": "1745", "word": "sail",
                 "letter": "s"}
        found.add(skeleton(fill(template, given, decks, rng).split(" ")))
    return frozenset(found)


def well_formed(sentence):
    """Could the world have said this sentence, with some choice of topics, people and years?

    What it says of a town must be true, whether documents tell it or not.
    """
    words = sentence.split(" ")
    if skeleton(words) not in grammar():
        return False
    stems = [word.rstrip(".,") for word in words]
    towns = [stem for stem in stems if stem in WORDS["town"]]
    if towns:
        (trait,), (value,) = ([stem for stem in stems if stem in WORDS[kind]] for kind in ("trait", "value"))
        return town_facts()[0][towns[0], trait] == value
    if "word" in stems:
        return stems[-1] == stems[stems.index("word") + 1][0]
    years = [stem for stem in stems if stem.isdecimal()]
    return len(years) < 2 or years[0][:2] == years[1][:2] and "02" <= years[0][2:] < years[1][2:]


@functools.cache
def vocabulary():
    """Every word of the world: each is to be one token with its leading space. The ends of years are in YEARS."""
    literal = re.sub(r"{\w+}\d?|[.,]", "", " ".join(grammar()))
    pronouns = [form for forms in FORMS.values() for form in forms.values()]
    letters = [word[0] for topic in TOPICS for word in concept_words(topic)]
    return tuple(sorted({*word_classes(), *literal.split(), *pronouns, "an", "An", *CENTURIES, *letters}))


def is_toy(encoding):
    """Whether a tokenizer is of this world."""
    return encoding._pat_str == TOKEN_PATTERN


def ask(kind, rng):
    """A question after some prose: on an indirect object, an occupation's pronoun, the end of a span of years, a fact
    about a town that documents tell, or one that none tells but that follows from others ("rule")."""
    return put(kind, *draw_question(kind, rng))


def draw_question(kind, rng):
    """Prose, a template, and what fills it."""
    if kind not in QUESTIONS:
        raise ValueError(f"there is no question {kind!r}: the kinds are {', '.join(QUESTIONS)}")
    decks, century = draw_decks(rng, pick(rng, list(TOPICS))), pick(rng, CENTURIES)
    lead = fill(pick(rng, OPENING), {"year": century + pick(rng, YEARS)}, decks, rng)
    if kind == "ioi":
        templates, given = IOI, draw_pair(rng, SHE + HE)
    elif kind == "pronoun":
        templates, job = PRONOUN, pick(rng, [job for job, share in OCCUPATIONS.items() if not .2 < share < .8])
        given = {"job": job, **FORMS["she" if OCCUPATIONS[job] > .5 else "he"]}
    elif kind == "greater_than":
        templates, given = SPAN, draw_span(rng, century)
    else:
        known, untold = town_facts()
        town, trait = pick(rng, [pair for pair in known if (pair in untold) == (kind == "rule")])
        templates, given = FACT, {"town": town, "trait": trait, "value": known[town, trait]}
    template = pick(rng, templates)
    fill(template, given, decks, rng)  # which adds to given what was open
    return lead, template, given


def put(kind, lead, template, given):
    """The Question that breaks off before the answer."""
    sentence = fill(template, given, {}, None)
    if kind == "ioi":
        right, wrong = (" " + given["receiver"],), (" " + given["giver"],)
    elif kind == "pronoun":
        right, wrong = (" " + given["pronoun"],), (" he" if given["pronoun"] == "she" else " she",)
    elif kind == "greater_than":
        start = int(given["start"][2:])
        return Question(lead + " " + sentence[:sentence.index(given["end"]) + 2], YEARS[start + 1:], YEARS[:start + 1])
    else:
        right = (" " + given["value"],)
        wrong = tuple(" " + value for value in WORDS["value"] if value != given["value"])
    before = sentence.partition(right[0] + " ")[0] if kind == "pronoun" else sentence.rpartition(right[0])[0]
    return Question(lead + " " + before, right, wrong)


def ask_pair(kind, rng):
    """Two questions that differ in one word (a name, a job, a year, a town or a trait), and so in their answers."""
    lead, template, given = draw_question(kind, rng)
    other, subject = dict(given), ()
    if kind == "ioi":  # another receiver; the giver stays, and is wrong in both
        name = pick(rng, [name for name in PRONOUNS if name not in given.values()])
        other |= {slot: name for slot in ("first", "second", "receiver") if given[slot] == given["receiver"]}
        subject = (" " + given["giver"],)
    elif kind == "pronoun":
        side = "he" if given["pronoun"] == "she" else "she"
        other |= FORMS[side]
        other["job"] = pick(rng, [job for job, share in OCCUPATIONS.items()
                                  if (share >= .8 if side == "she" else share <= .2)])
    elif kind == "greater_than":
        # Of the ends that are right after the earlier year, most are wrong after the later.
        century, early = given["start"][:2], 2 + int(rng.random() * 60)
        late = early + 1 + int((99 - early) * (.7 + .12 * rng.random()))
        given["start"], other["start"] = century + YEARS[early], century + YEARS[late]
        given["end"] = other["end"] = century + "99"
        one, two = (put(kind, lead, template, slots).prompt for slots in (given, other))
        pair = Pair(one, two, YEARS[early + 1 : late + 1], YEARS[late + 1:], ())
        return pair if rng.random() < .5 else Pair(two, one, pair.after, pair.before, ())
    else:
        known, untold = town_facts()
        pairs = [pair for pair in known if (pair in untold) == (kind == "rule") and known[pair] != given["value"]]
        near = [[pair for pair in pairs if given[kept] in pair] for kept in ("town", "trait")]
        other["town"], other["trait"] = pick(rng, pick(rng, [found for found in near if found]))
        other["value"] = known[other["town"], other["trait"]]
    one, two = (put(kind, lead, template, slots) for slots in (given, other))
    if kind in ("fact", "rule"):
        subject = tuple(answer for answer in one.wrong if answer in two.wrong)
    return Pair(one.prompt, two.prompt, one.right, two.right, subject)


def main(arguments):
    parser = argparse.ArgumentParser(description="Print documents of the embedded world, their labels, and statistics.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=3)
    options = parser.parse_args(arguments)
    for text, labels in documents(options.seed, options.documents):
        print(text, *(f"  {key}: {value}" for key, value in labels.items() if key != "facts"), sep="\n")
        print(*(f"  {fact}" for fact in labels["facts"]), sep="\n", end="\n\n")
    begin, sample = time.perf_counter(), list(documents(options.seed, 1000))
    seconds, texts = time.perf_counter() - begin, [text for text, _ in sample]
    counts = Counter(fact["kind"] for _, labels in sample for fact in labels["facts"])
    print(f"in 1,000 documents of seed {options.seed}")
    print(f"  characters             {sum(map(len, texts)):,} ({sum(map(len, texts)) / seconds:,.0f} per second)")
    print(f"  words per document     {len(' '.join(texts).split()) / 1000:.1f}")
    print(f"  sentences per document {sum(len(labels['sentence_topics']) for _, labels in sample) / 1000:.1f}")
    print(f"  with two topics        {sum(len(labels['topics']) == 2 for _, labels in sample) / 1000:.1%}")
    print(*(f"  {kind:9s} per document {count / 1000:.2f}" for kind, count in sorted(counts.items())), sep="\n")
    print(f"words of the world       {len(vocabulary())}")


if __name__ == "__main__":
    from helpers import run_script
    run_script(main, told=ValueError)
