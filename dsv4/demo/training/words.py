"""Closed word lists of the demo tasks: facts, names, nouns and story tables."""

CAPITALS: dict[str, str] = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Belgium": "Brussels",
    "Croatia": "Zagreb",
    "Bulgaria": "Sofia",
    "Romania": "Bucharest",
    "Ukraine": "Kyiv",
    "Estonia": "Tallinn",
    "Latvia": "Riga",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Nigeria": "Abuja",
    "Morocco": "Rabat",
    "Senegal": "Dakar",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "Delhi",
    "Nepal": "Kathmandu",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Jordan": "Amman",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
    "Ecuador": "Quito",
    "Australia": "Canberra",
    "Russia": "Moscow",
}

NAMES = tuple(
    (
        "Alice Bob Carla David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olga Paul Rosa "
        "Sam Tina Victor"
    ).split()
)
COLOURS = tuple("red blue green yellow purple orange white black brown pink".split())
HOBBIES = tuple(
    "chess football painting reading swimming dancing cooking running singing hiking".split()
)

WORDS = tuple(
    """apple arrow autumn badge bag ball banana basket beach bear bell bench berry bird boat bone
    book bottle box branch bread brick bridge brush bucket butter cabin cake camel camera candle
    car card carpet castle cat chain chair cheese cherry circle city clock cloud coat coffee
    coin corn cow crown cup curtain daisy deer desert desk diamond dog dollar door dragon drum
    duck eagle ear egg engine farm feather fence field finger fire fish flag flame flower forest
    fork fox frog garden gate ghost giant glass globe glove goat gold grape grass guitar hammer
    hand harbor hat hill honey horse hotel house island jacket jar jewel juice jungle kettle key
    king kite knife ladder lake lamp leaf lemon letter lion lizard magnet map market mask melon
    metal milk mirror monkey moon mountain mouse needle nest night nut ocean onion oven owl
    paint palace paper park peach pear pencil pepper piano picture pillow pizza planet plate
    pocket potato prince queen rabbit radio rain ribbon rice ring river road robot rocket roof
    rope rose salad salt sand school shell ship shirt shoe silver snow soap spider spoon spring
    star stone storm sugar summer sun table tea tent tiger tomato tower train tree truck turtle
    valley violin wagon wall water whale wheel window winter wolf wood zebra""".split()
)

# Recall tells codes of KEYS in VALUES between lines about FILLERS: no word plays two parts.
KEYS = WORDS[0:240:3]
VALUES = WORDS[1:240:3]
FILLERS = WORDS[2:240:3]

STORY_ANIMALS: dict[str, str] = {
    "fox": "in a quiet forest",
    "rabbit": "under an old hill",
    "bear": "in a warm cave",
    "owl": "in a tall tree",
    "turtle": "beside a blue lake",
    "mouse": "behind a kitchen wall",
    "lion": "on a golden plain",
    "duck": "near a small river",
    "goat": "on a high mountain",
    "cat": "in a sunny house",
}
STORY_TRAITS: dict[str, tuple[str, str]] = {
    "brave": ("was not afraid and picked it up at once", "Courage opens many doors."),
    "shy": ("hid behind a bush and waited for a while", "Even quiet hearts find great things."),
    "clever": ("looked at it from every side and made a plan", "A good plan is worth a lot."),
    "lazy": ("slept next to it until the evening", "There is always time for a rest."),
    "kind": ("asked everyone whether they had lost it", "Kindness always comes back."),
    "curious": ("touched it and listened very carefully", "Every question is a little journey."),
}
STORY_THINGS: dict[str, str] = {
    "lamp": "It lit up the whole night.",
    "key": "It opened a secret garden.",
    "map": "It led to a hidden island.",
    "ring": "It sang a soft old song.",
    "coin": "It bought bread for everyone.",
    "bell": "It rang and all the friends came.",
    "book": "It told the story of the stars.",
    "kite": "It flew up to the clouds.",
    "mirror": "It showed a smiling face.",
    "drum": "It made the whole valley dance.",
}

WEATHER = tuple("sunny rainy cloudy windy snowy foggy".split())
SUBJECTS = tuple("farmer teacher doctor sailor baker singer driver painter writer soldier".split())
VERBS = tuple("watches finds paints carries sells cleans likes hides brings follows".split())
PLACES = tuple("morning evening winter summer rain garden market city forest house".split())
