/**
 * The pattern language of module names, the same as Python's (record/patterns.py, which describes
 * it): `layers.*.attn`, `**.wq`, `layers.[8-15]`. `patterns.cases.json` has what Python answers.
 */

const ANY_PARTS = "**";
const NUMBER_RANGE = /^\[([0-9]{1,9})-([0-9]{1,9})\]$/;
const LAYER_NUMBER = /^[0-9]{1,9}$/;

/** Whether the text has wildcards. */
export function isPattern(text: string): boolean {
  return /[*?[]/.test(text);
}

/** Whether the pattern matches the name, or that of a module that contains it. */
export function matchesInside(pattern: string, name: string): boolean {
  return matchParts([...splitName(pattern), ANY_PARTS], splitName(name));
}

/** Whether the pattern matches the dotted name of a module. */
export function matchesName(pattern: string, name: string): boolean {
  return matchParts(splitName(pattern), splitName(name));
}

function splitName(name: string): readonly string[] {
  return name === "" ? [] : name.split(".");
}

function matchParts(patternParts: readonly string[], parts: readonly string[]): boolean {
  return matchWithStars(
    patternParts,
    parts,
    (patternPart) => patternPart === ANY_PARTS,
    (patternPart, part) => matchPart(patternPart, part),
  );
}

/** Matches as shells do: on a mismatch, the last star matches one item more. */
function matchWithStars<Token, Item>(
  tokens: readonly Token[],
  items: readonly Item[],
  isStar: (token: Token) => boolean,
  isMatch: (token: Token, item: Item) => boolean,
): boolean {
  let [at, index, star, resumeAt] = [0, 0, -1, 0];
  while (index < items.length) {
    if (at < tokens.length && isStar(tokens[at]!)) {
      [star, resumeAt] = [at, index];
      at += 1;
    } else if (at < tokens.length && isMatch(tokens[at]!, items[index]!)) {
      at += 1;
      index += 1;
    } else if (star >= 0) {
      resumeAt += 1;
      [at, index] = [star + 1, resumeAt];
    } else {
      return false;
    }
  }
  return tokens.slice(at).every(isStar);
}

function matchPart(patternPart: string, part: string): boolean {
  if (patternPart === part) return true;
  const range = NUMBER_RANGE.exec(patternPart);
  if (range) {
    return LAYER_NUMBER.test(part) && +range[1]! <= Number(part) && Number(part) <= +range[2]!;
  }
  return matchWithStars(
    parseTokens(patternPart),
    [...part],
    (token) => token === STAR,
    (token, character) => token !== STAR && token(character),
  );
}

const STAR = Symbol("any characters");
type Token = typeof STAR | ((character: string) => boolean);

const tokensByPart = new Map<string, readonly Token[]>();

/** The wildcards and characters of a part, as in names of files. */
function parseTokens(patternPart: string): readonly Token[] {
  const known = tokensByPart.get(patternPart);
  if (known) return known;
  const tokens: Token[] = [];
  const characters = [...patternPart];
  for (let i = 0; i < characters.length; ) {
    const character = characters[i]!;
    const end = character === "[" ? findSetEnd(characters, i) : -1;
    if (end >= 0) tokens.push(parseSet(characters.slice(i + 1, end)));
    else if (character === "*") tokens.push(STAR);
    else if (character === "?") tokens.push(() => true);
    else tokens.push((candidate) => candidate === character);
    i = end >= 0 ? end + 1 : i + 1;
  }
  tokensByPart.set(patternPart, tokens);
  return tokens;
}

/** Position of the bracket that closes a set; -1 if there is none, and `[` stands for itself. */
function findSetEnd(characters: readonly string[], start: number): number {
  let first = start + 1;
  if (characters[first] === "!") first += 1;
  if (characters[first] === "]") first += 1;
  return characters.indexOf("]", first);
}

/** `qkv`, `!qkv` or `a-z`, without its brackets. */
function parseSet(characters: readonly string[]): Token {
  const isNegated = characters[0] === "!";
  const ranges: (readonly [string, string])[] = [];
  for (let i = isNegated ? 1 : 0; i < characters.length; ) {
    const isRange = characters[i + 1] === "-" && i + 2 < characters.length;
    ranges.push([characters[i]!, characters[isRange ? i + 2 : i]!]);
    i += isRange ? 3 : 1;
  }
  const codeOf = (character: string): number => character.codePointAt(0)!;
  return (candidate) =>
    isNegated !==
    ranges.some(
      ([low, high]) => codeOf(low) <= codeOf(candidate) && codeOf(candidate) <= codeOf(high),
    );
}
