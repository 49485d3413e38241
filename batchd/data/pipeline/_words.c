/* Cuts text into the words of a tokenizer, and joins the numbers of words that are known. Worker
 * process.
 *
 *     letters   H  i     t  h  e  r  e        one byte a character: itself in ASCII, or a class
 *     words    [Hi][ there]                   the first alternative that matches, as long as it can
 *     memo     {"Hi": 17.., " there": 108..}  int32 of each token, as bytes
 *     table    [letters 15][size 1][tokens 12][count 4] x 2^n
 *              short words of the memo, to save objects: each in one of two neighbours
 *
 *     program  [sets][alternatives]  32 bytes: a bit for each letter  x sets
 *                                    items  [set, least, most] x items  x alternatives
 *
 * most = 255 is any number; most = 0: the next letter, if there is one, is not of the set.
 * `text/byte_pairs.py` writes programs; without this extension the library encodes.
 *
 * Invariant: nothing is read outside of the arguments, whatever these are.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

struct entry {
    uint8_t letters[15], size; /* 0: empty */
    int32_t numbers[3];
    uint32_t count;
};

enum { SET_BYTES = 32, SETS_MAX = 64, ITEMS_MAX = 256, ALTERNATIVES_MAX = 64, ITEM_BYTES = 3, ANY = 255, ASCII = 128 };
enum { GOES_ON = 253, UNKNOWN = 255, CHARACTERS = 0x110000, HAS_CLASSES = 1, HAS_UNKNOWN = 2 };

struct item {
    const uint8_t *set;
    int least, most;
};

struct program {
    struct item items[ITEMS_MAX];
    int ends[ALTERNATIVES_MAX]; /* of the items of each alternative */
    uint8_t begins[ALTERNATIVES_MAX][SET_BYTES]; /* the letters that each may begin with */
    int alternatives;
};

/* The letters with which some items may begin: those of all that may be absent, and of the first
 * that may not. */
static void find_begins(const struct item *item, const struct item *end, uint8_t *begins)
{
    memset(begins, 0, SET_BYTES);
    for (; item < end; item++) {
        for (int i = 0; i < SET_BYTES; i++) begins[i] |= item->most ? item->set[i] : 255;
        if (item->least > 0 || !item->most) return;
    }
}

static int read_program(const Py_buffer *from, struct program *into)
{
    const uint8_t *bytes = from->buf;
    Py_ssize_t at = 1, items = 0;
    into->alternatives = 0;
    if (from->len < 1 || bytes[0] > SETS_MAX || from->len < 1 + bytes[0] * SET_BYTES) return 0;
    for (at += bytes[0] * SET_BYTES; at < from->len; into->alternatives++) {
        Py_ssize_t count = bytes[at++];
        if (into->alternatives == ALTERNATIVES_MAX || items + count > ITEMS_MAX || at + count * ITEM_BYTES > from->len) return 0;
        for (; count > 0; count--, at += ITEM_BYTES) {
            if (bytes[at] >= bytes[0]) return 0;
            into->items[items++] = (struct item){bytes + 1 + bytes[at] * SET_BYTES, bytes[at + 1], bytes[at + 2]};
        }
        into->ends[into->alternatives] = (int)items;
        int first = into->alternatives ? into->ends[into->alternatives - 1] : 0;
        find_begins(into->items + first, into->items + items, into->begins[into->alternatives]);
    }
    return 1;
}

static int has(const struct item *item, uint8_t letter) { return item->set[letter >> 3] >> (letter & 7) & 1; }

/* The end of a match from `at` on; -1 if there is none. As deep as an alternative has items. */
static Py_ssize_t match(const struct item *item, const struct item *end, const uint8_t *letters, Py_ssize_t at, Py_ssize_t size)
{
    if (item == end) return at;
    if (!item->most) return at < size && has(item, letters[at]) ? -1 : match(item + 1, end, letters, at, size);
    Py_ssize_t last = at, limit = item->most == ANY || item->most > size - at ? size : at + item->most;
    while (last < limit && has(item, letters[last])) last++;
    for (; last - at >= item->least; last--) {
        Py_ssize_t found = match(item + 1, end, letters, last, size);
        if (found >= 0) return found;
    }
    return -1;
}

/* The end of the word at `at`; `at` itself if nothing matches. */
static Py_ssize_t word_end(const struct program *program, const uint8_t *letters, Py_ssize_t at, Py_ssize_t size)
{
    int first = 0;
    for (int i = 0; i < program->alternatives; first = program->ends[i++]) {
        if (!(program->begins[i][letters[at] >> 3] >> (letters[at] & 7) & 1)) continue;
        Py_ssize_t end = match(program->items + first, program->items + program->ends[i], letters, at, size);
        if (end > at) return end;
    }
    return at;
}

struct numbers {
    char *bytes;
    Py_ssize_t size, room;
};

/* Returns 0 with an exception. */
static int add(struct numbers *numbers, const void *bytes, Py_ssize_t size)
{
    if (numbers->size + size > numbers->room) {
        Py_ssize_t room = 2 * (numbers->size + size);
        char *larger = PyMem_Realloc(numbers->bytes, (size_t)room);
        if (!larger) return PyErr_NoMemory(), 0;
        numbers->bytes = larger;
        numbers->room = room;
    }
    if (size) memcpy(numbers->bytes + numbers->size, bytes, (size_t)size);
    numbers->size += size;
    return 1;
}

static int is_of(const struct entry *entry, const uint8_t *letters, Py_ssize_t size)
{
    return entry->size == size && entry->count <= 3 && !memcmp(entry->letters, letters, (size_t)size);
}

/* The entry of a word, else one for it, which may have another one; NULL for one that is long, or
 * not of ASCII. */
static struct entry *entry_of(const Py_buffer *table, const uint8_t *letters, Py_ssize_t size)
{
    uint64_t hash = (uint64_t)size;
    if (size > (Py_ssize_t)sizeof(((struct entry *)0)->letters)) return NULL;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (letters[i] >= ASCII) return NULL;
        hash = (hash ^ letters[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    uint64_t last = (uint64_t)table->len / sizeof(struct entry) - 1, place = hash & last;
    struct entry *one = (struct entry *)table->buf + place, *other = (struct entry *)table->buf + ((place ^ 1) & last);
    return is_of(other, letters, size) || (!other->size && one->size && !is_of(one, letters, size)) ? other : one;
}

/* Adds what the memo has of a word. Returns 0 with an exception. */
static int add_word(struct numbers *numbers, PyObject *memo, const Py_buffer *table, PyObject *text, const uint8_t *letters, Py_ssize_t first,
                    Py_ssize_t end)
{
    Py_ssize_t size = end - first;
    struct entry *entry = entry_of(table, letters + first, size);
    if (entry && is_of(entry, letters + first, size))
        return add(numbers, entry->numbers, entry->count * (Py_ssize_t)sizeof *entry->numbers);
    PyObject *word = PyUnicode_Substring(text, first, end);
    PyObject *known = word ? PyObject_GetItem(memo, word) : NULL;
    char *bytes;
    Py_ssize_t length;
    int is_added = known && !PyBytes_AsStringAndSize(known, &bytes, &length) && add(numbers, bytes, length);
    if (is_added && entry && length <= (Py_ssize_t)sizeof entry->numbers) {
        memcpy(entry->letters, letters + first, (size_t)size);
        memcpy(entry->numbers, bytes, (size_t)length);
        entry->size = (uint8_t)size;
        entry->count = (uint32_t)length / sizeof *entry->numbers;
    }
    Py_XDECREF(word);
    Py_XDECREF(known);
    return is_added;
}

PyDoc_STRVAR(letters_doc,
             "letters(text, table) -> (bytearray, int)\n\n"
             "The letter of each character: `table` has those of all, uint8 [1114112]. And what there is: 1 for classes, 2 for what\n"
             "is unknown. Raises UnicodeEncodeError for half of a surrogate pair, ValueError for another table.");

static PyObject *letters_of(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *text, *made, *result = NULL;
    Py_buffer table;
    if (!PyArg_ParseTuple(arguments, "Uy*", &text, &table)) return NULL;
    Py_ssize_t bytes, size = PyUnicode_GetLength(text);
    const uint8_t *of = table.buf, *from = (const uint8_t *)PyUnicode_AsUTF8AndSize(text, &bytes);
    if (table.len != CHARACTERS) {
        PyErr_SetString(PyExc_ValueError, "the table has a letter for each character");
    } else if (from && (made = PyByteArray_FromStringAndSize(NULL, size))) {
        uint8_t *into = (uint8_t *)PyByteArray_AsString(made);
        int found = 0;
        for (Py_ssize_t at = 0, i = 0; i < size; i++) {
            uint32_t code = from[at++];
            if (code >= ASCII) { /* Python's own UTF-8 is whole */
                int more = code < 0xE0 ? 1 : code < 0xF0 ? 2 : 3;
                for (code &= 0x3Fu >> more; more > 0; more--) code = code << 6 | (from[at++] & 0x3F);
            }
            into[i] = of[code];
            found |= into[i] == UNKNOWN ? HAS_UNKNOWN : into[i] >= ASCII && into[i] < GOES_ON ? HAS_CLASSES : 0;
        }
        result = Py_BuildValue("Ni", made, found);
    }
    PyBuffer_Release(&table);
    return result;
}

PyDoc_STRVAR(place_doc,
             "place(ends, character) -> (int, int, int, int)\n\n"
             "The word of a character, from what `encode` says of words: its first character and its end, its first token, and how\n"
             "many it has. Raises ValueError for a character behind all words.");

static PyObject *place(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer buffer;
    Py_ssize_t character;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(arguments, "y*n", &buffer, &character)) return NULL;
    Py_ssize_t first = 0, end = buffer.len / (2 * (Py_ssize_t)sizeof(int32_t));
    const int32_t *ends = buffer.buf;
    if ((uintptr_t)ends % sizeof *ends) end = first;
    while (first < end) {
        Py_ssize_t middle = first + (end - first) / 2;
        if (ends[2 * middle] <= character) first = middle + 1;
        else end = middle;
    }
    if (character < 0 || (uintptr_t)ends % sizeof *ends || (first + 1) * 2 * (Py_ssize_t)sizeof *ends > buffer.len) {
        PyErr_SetString(PyExc_ValueError, "the character is in no word");
    } else {
        int32_t begin = first ? ends[2 * first - 2] : 0, before = first ? ends[2 * first - 1] : 0;
        int size = (int)sizeof(int32_t);
        result = Py_BuildValue("iiii", begin, ends[2 * first], before / size, ends[2 * first + 1] / size - before / size);
    }
    PyBuffer_Release(&buffer);
    return result;
}

PyDoc_STRVAR(encode_doc,
             "encode(text, letters, program, memo, table) -> (bytes, bytes)\n\n"
             "The numbers of all words of a text, as `memo` has them, and int32 [words, 2]: the end of each word in characters, and\n"
             "that of its numbers in bytes. Fewer words than all where none begins. `table` is 2^n entries of 32 bytes, zeros at\n"
             "first. Raises ValueError for arguments that do not fit, and what `memo` raises.");

static PyObject *encode(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *text, *memo, *result = NULL;
    Py_buffer letters, read, table;
    struct program program;
    if (!PyArg_ParseTuple(arguments, "Uy*y*Ow*", &text, &letters, &read, &memo, &table)) return NULL;
    Py_ssize_t size = letters.len, words = 0, at = 0, entries = table.len / (Py_ssize_t)sizeof(struct entry);
    struct numbers numbers = {NULL, 0, 0};
    int32_t *ends = NULL;
    if (PyUnicode_GetLength(text) != size || size > INT32_MAX || !read_program(&read, &program) || entries < 1 || entries & (entries - 1) ||
        (uintptr_t)table.buf % sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "letters are as many as characters, the program is whole, the table a power of 2");
    } else if (!(ends = PyMem_Malloc((size_t)(size + 1) * 2 * sizeof *ends))) {
        PyErr_NoMemory();
    } else {
        for (Py_ssize_t end; at < size && (end = word_end(&program, letters.buf, at, size)) > at; at = end, words++) {
            if (!add_word(&numbers, memo, &table, text, letters.buf, at, end)) break;
            ends[2 * words] = (int32_t)end;
            ends[2 * words + 1] = (int32_t)numbers.size;
        }
        if (!PyErr_Occurred())
            result = Py_BuildValue("y#y#", numbers.bytes ? numbers.bytes : "", numbers.size, (char *)ends, words * 2 * (Py_ssize_t)sizeof *ends);
    }
    PyMem_Free(numbers.bytes);
    PyMem_Free(ends);
    PyBuffer_Release(&letters);
    PyBuffer_Release(&read);
    PyBuffer_Release(&table);
    return result;
}

static PyMethodDef METHODS[] = {
    {"encode", encode, METH_VARARGS, encode_doc},
    {"letters", letters_of, METH_VARARGS, letters_doc},
    {"place", place, METH_VARARGS, place_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_words", "Words of texts, and their numbers.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__words(void)
{
    return PyModule_Create(&MODULE);
}
